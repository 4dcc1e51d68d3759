#pragma once

#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

namespace infinitybatch {

/// While it lives no dispatch mode of Python's sees the ops of this thread, and they have no graph.
/// For putting things back: a mode whose error has ended a step may raise at the next op, too, and
/// what is put back is none of its business. Tensors with an op dispatch of their own keep it.
class Unwatched {
 public:
  Unwatched();
  ~Unwatched();
  Unwatched(const Unwatched&) = delete;
  Unwatched& operator=(const Unwatched&) = delete;

 private:
  const at::NoGradGuard no_grad_;
  const c10::impl::LocalDispatchKeySet keys_;
  c10::impl::TorchDispatchModeTLS modes_;
};

}  // namespace infinitybatch
