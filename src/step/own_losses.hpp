#pragma once

#include "core/callback_errors.hpp"
#include "tape/op_bus.hpp"

#include <infinitybatch/core/batch.hpp>

#include <ATen/core/TensorBody.h>

#include <memory>
#include <vector>

namespace infinitybatch {

/// What one number is that a model's forward returns.
struct OwnLoss {
  enum class Kind {
    unknown,
    sum,   ///< over targets, divided at most by a number that all micro-batches are given
    mean,  ///< over targets, which count `weight` together
  };
  Kind kind = Kind::unknown;
  at::Tensor weight;  ///< 0-dimensional; of ignored targets 0
};

/// Recognises cross entropies that forward computes from its own targets and returns, as language
/// models do: a mean over those that are not ignored says beside it how much they weigh, and so can
/// be joined exactly with other micro-batches'. It listens while forward runs.
class OwnLosses final : public tape::OpListener {
 public:
  std::unique_ptr<tape::OpContext> begin(const tape::SeenOp& op) noexcept override;
  void end(const tape::SeenOp& op, tape::OpContext* context) noexcept override;

  /// \param inputs that forward is given: single numbers among them are every micro-batch's
  void watch(const Batch& inputs);
  /// Of each leaf of what forward has returned, detached or not. \throws what went wrong while it
  /// listened
  std::vector<OwnLoss> of(const Batch& outputs);
  void forget() { found_.clear(); }

 private:
  struct Found {
    c10::weak_intrusive_ptr<c10::StorageImpl> loss;  // nobody else's address while it is here
    uint32_t version;                                // writes into it make it something else
    OwnLoss what;
  };
  const OwnLoss* find(const at::Tensor& tensor) const;
  bool is_given(const at::Tensor& number) const;

  CallbackErrors errors_;
  std::vector<Found> found_;
  std::vector<at::Tensor> given_;
};

}  // namespace infinitybatch
