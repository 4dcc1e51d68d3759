#include "core/thread_context.hpp"

namespace infinitybatch {

ThreadContext& ThreadContext::get() noexcept {
  static thread_local constinit ThreadContext context;
  return context;
}

}  // namespace infinitybatch
