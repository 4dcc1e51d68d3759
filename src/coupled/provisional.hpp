#pragma once

#include "core/thread_context.hpp"

namespace infinitybatch::coupled {

/// While it lives, functions of `across_batch` run in this thread for the form of their result
/// alone: a binding undoes what they leave in its language.
class ProvisionalRun {
 public:
  static bool at_work() noexcept;

 private:
  const Within<&ThreadContext::provisional> within_{true};
};

}  // namespace infinitybatch::coupled
