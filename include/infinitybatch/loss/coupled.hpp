#pragma once

#include <infinitybatch/core/batch.hpp>

#include <c10/core/Device.h>

#include <functional>
#include <optional>
#include <string>

namespace infinitybatch {

/// A loss that compares samples with each other (contrastive, batch-hard, ranking), or of which
/// nobody knows that it does not. It sees the outputs of the whole logical batch at once.
class CoupledLoss {
 public:
  /// \param outputs what the model would have returned for the whole logical batch
  /// \param targets all targets
  /// \return one number that carries gradient
  using Value = std::function<at::Tensor(const Batch& outputs, const Batch& targets)>;

  /// \param device where outputs are assembled and the loss is computed; nothing: where the model
  /// is
  /// \throws InvalidArgument where `value` is nothing
  CoupledLoss(std::string name, Value value, std::optional<at::Device> device = std::nullopt);

  const std::string& name() const noexcept { return name_; }
  /// 0-dimensional. \throws InvalidArgument where the function gives more than one number
  at::Tensor value(const Batch& outputs, const Batch& targets) const;
  const std::optional<at::Device>& device() const noexcept { return device_; }

 private:
  std::string name_;
  Value value_;
  std::optional<at::Device> device_;
};

namespace losses {

/// A loss of the user's own, always exact. Over the batches of several ranks it gathers their
/// outputs itself, by operations that carry gradient, and is the same on each rank; the mean of the
/// ranks' gradients is then that of the batch of all. Each rank computes it once in a step; where
/// memory runs out after that the step throws Unsupported, for the other ranks would not answer a
/// second time.
/// \param value  (outputs, targets) of the whole logical batch -> 0-dimensional loss; it may use
///               parameters of its own, which get their gradient once, and may change outputs in
///               place, or set hooks on them: it is given what a model gives, no leaves
/// \param device where it is computed, the host included; nothing: where the model is
CoupledLoss coupled(CoupledLoss::Value value, std::optional<at::Device> device = std::nullopt);

}  // namespace losses
}  // namespace infinitybatch
