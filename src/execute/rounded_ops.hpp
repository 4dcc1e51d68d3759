#pragma once

#include "core/callback_errors.hpp"
#include "tape/op_bus.hpp"

#include <cstdint>
#include <memory>

namespace infinitybatch {

/// While it lives, what ops of this thread compute has other last bits, as kernels of other batch
/// sizes round. What they only move or select keeps its own: inputs, parameters and buffers have
/// the same bits however a batch is split, so what is found in them by its value is found in any
/// split. See `round_otherwise` for what stays.
///
/// Equal numbers stay equal; where two come out of a tie, `MovedValues::Nudge` tells them apart.
class RoundedOps final : public tape::OpListener {
 public:
  /// \param which another number, other bits
  explicit RoundedOps(uint32_t which);
  RoundedOps(const RoundedOps&) = delete;
  RoundedOps& operator=(const RoundedOps&) = delete;

 private:
  struct Given;
  std::unique_ptr<tape::OpContext> begin(const tape::SeenOp& op) noexcept override;
  void end(const tape::SeenOp& op, tape::OpContext* context) noexcept override;

  uint32_t which_;
  CallbackErrors errors_;  // what could not be rounded (there is no memory) stays as it is
  tape::OpBus::Scope listening_;
};

}  // namespace infinitybatch
