#include "few_rows.hpp"

#include <infinitybatch/core/exception_text.hpp>

#include <utility>

namespace infinitybatch {

bool FewRows::meet(const std::string& kind, int64_t rows, int64_t total, std::exception_ptr error) {
  if (rows == 0) return false;
  if (rows == total) {
    failures_.erase(kind);
    return false;
  }
  Failure& failure = failures_[kind];
  if (rows <= failure.rows) return false;
  failure = {rows, first_line_of(error)};
  error_ = std::move(error);
  return true;
}

int64_t FewRows::failing(const std::string& kind) const {
  const auto found = failures_.find(kind);
  return found == failures_.end() ? 0 : found->second.rows;
}

void FewRows::refuse(const std::string& kind, int64_t total, const BudgetExceeded& why) {
  const Failure failure = failures_.at(kind);
  failures_.erase(kind);
  const BudgetExceeded refusal(
      why.needed(), why.limit(), std::nullopt,
      "The model fails on a micro-batch of " + std::to_string(failure.rows) + " of the " +
          std::to_string(total) + " samples (" + failure.text + "), and a larger one");
  if (!error_) throw refusal;
  try {
    std::rethrow_exception(error_);
  } catch (...) {
    std::throw_with_nested(refusal);
  }
}

void FewRows::clear() {
  failures_.clear();
  error_ = nullptr;
}

}  // namespace infinitybatch
