#include "step/programs.hpp"

namespace infinitybatch {

std::string Programs::identity(const Model& model, const std::string& arguments) {
  const uint64_t configuration = model.configuration ? model.configuration() : 0;
  return std::to_string(configuration) + arguments;
}

int64_t Programs::number(const std::string& identity) {
  asked_ = identity;
  // Another program may have been tried since, and failed.
  if (identity == left_) return last_ = left_by_;
  const auto [known, anew] = numbers_.try_emplace(identity, next_);
  if (anew) ++next_;
  return last_ = known->second;
}

}  // namespace infinitybatch
