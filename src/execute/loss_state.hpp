#pragma once

#include "core/thread_context.hpp"
#include "execute/plain_state.hpp"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace infinitybatch {

/// What a loss keeps between its calls (a queue of earlier embeddings, a counter, a moving
/// average), so that calls which do not count leave nothing of it. Copies lie outside of any memory
/// budget.
class LossState {
 public:
  LossState() = default;
  LossState(const LossState&) = delete;
  LossState& operator=(const LossState&) = delete;

  /// While it lives, losses in this thread tell a state.
  using Scope = Within<&ThreadContext::loss_state>;
  /// Whoever runs a loss that may keep something tells this one first; null where nobody asks.
  static LossState* at_work() noexcept;

  /// \param look called once in each step: what lies there, tensors too
  void before(const std::function<PlainState()>& look);
  /// All is as in front of the first call.
  /// \throws Unsupported where it was too much to be kept, and was written
  void roll_back();

 private:
  struct Kept {
    at::Tensor tensor;
    uint32_t version;
    std::vector<char> bytes;  // on the host
    at::Tensor copy;          // elsewhere
  };

  PlainState state_;
  std::vector<Kept> kept_;
  bool begun_ = false;
};

}  // namespace infinitybatch
