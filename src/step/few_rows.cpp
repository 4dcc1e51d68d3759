#include "step/few_rows.hpp"

#include "core/exception_text.hpp"

#include <utility>

namespace infinitybatch {

bool FewRows::meet(int64_t rows, int64_t total, std::exception_ptr error) {
  if (rows == 0) return false;
  if (rows == total) {
    rows_ = 0;
    return false;
  }
  if (rows <= rows_) return false;
  rows_ = rows;
  text_ = first_line_of(error);
  error_ = std::move(error);
  return true;
}

void FewRows::refuse(int64_t total, const BudgetExceeded& why) {
  const int64_t rows = std::exchange(rows_, 0);
  const BudgetExceeded refusal(why.needed(), why.limit(), std::nullopt,
                               "The model fails on a micro-batch of " + std::to_string(rows) +
                                   " of the " + std::to_string(total) + " samples (" + text_ +
                                   "), and a larger one");
  if (!error_) throw refusal;
  try {
    std::rethrow_exception(error_);
  } catch (...) {
    std::throw_with_nested(refusal);
  }
}

}  // namespace infinitybatch
