#include "core/callback_errors.hpp"

#include "core/foreign_exception.hpp"

namespace infinitybatch {
namespace {

thread_local int depth = 0;

}  // namespace

CallbackErrors::Inside::Inside() noexcept {
  ++depth;
}
CallbackErrors::Inside::~Inside() {
  --depth;
}

bool CallbackErrors::at_work() noexcept {
  return depth > 0;
}

void CallbackErrors::keep(std::exception_ptr error) noexcept {
  keep_foreign_exception(error);  // the op is yet to run, or others of its callbacks are
  if (!first_) first_ = std::move(error);
}

}  // namespace infinitybatch
