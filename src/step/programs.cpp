#include "step/programs.hpp"

namespace infinitybatch {

Programs::Identity Programs::identity(const Model& model, const std::string& arguments) {
  return {model.configuration ? model.configuration() : 0, arguments};
}

int64_t Programs::number(const Identity& identity) {
  asked_ = identity.configuration;
  // Another program may have been tried since, and failed.
  if (asked_ == left_) {
    last_ = left_by_;
  } else {
    const auto [known, anew] = configurations_.try_emplace(asked_, next_configuration_);
    if (anew) ++next_configuration_;
    last_ = known->second;
  }
  const auto [known, anew] = numbers_.try_emplace({last_, identity.arguments}, next_);
  if (anew) ++next_;
  return known->second;
}

}  // namespace infinitybatch
