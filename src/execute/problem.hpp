#pragma once

#include "core/row_range.hpp"
#include "execute/trimming.hpp"

#include <infinitybatch/core/batch_source.hpp>
#include <infinitybatch/core/micro_batch.hpp>
#include <infinitybatch/core/model.hpp>
#include <infinitybatch/loss/coupled.hpp>
#include <infinitybatch/loss/loss.hpp>

#include <functional>
#include <memory>
#include <variant>
#include <vector>

namespace infinitybatch {

class ExternalLoss;

/// Where the gradients of outputs come from: each micro-batch's share of a separable loss, the loss
/// of all outputs, or whoever computes it outside of the step.
class LossPort {
 public:
  LossPort() = default;
  LossPort(const std::variant<SeparableLoss, CoupledLoss>&
               loss) {  // NOLINT(google-explicit-constructor)
    std::visit([this](const auto& each) { from_ = &each; }, loss);
  }
  LossPort(const SeparableLoss& loss) : from_(&loss) {}  // NOLINT(google-explicit-constructor)
  LossPort(const CoupledLoss& loss) : from_(&loss) {}    // NOLINT(google-explicit-constructor)
  LossPort(ExternalLoss& loss) : from_(&loss) {}         // NOLINT(google-explicit-constructor)

  // One of them; the others are null.
  const SeparableLoss* separable() const noexcept { return get<const SeparableLoss*>(); }
  const CoupledLoss* coupled() const noexcept { return get<const CoupledLoss*>(); }
  ExternalLoss* external() const noexcept { return get<ExternalLoss*>(); }

 private:
  template <typename T>
  T get() const noexcept {
    const T* found = std::get_if<T>(&from_);
    return found != nullptr ? *found : nullptr;
  }
  std::variant<std::monostate, const SeparableLoss*, const CoupledLoss*, ExternalLoss*> from_;
};

/// What is computed for one logical batch. It stays the same while a step runs, whatever the
/// strategy: all of them give the same result.
struct Problem {
  const Model* model = nullptr;
  LossPort loss;
  const BatchSource* inputs = nullptr;
  const BatchSource* targets = nullptr;
  std::vector<NamedParameter> parameters;
  std::vector<BufferSlot> buffers;
  at::Device device = at::kCPU;
  std::vector<at::Device> further_devices;  ///< whose generators forward may draw from, too
  bool training = true;                     ///< the model's mode
  int64_t program = 0;                      ///< which one forward is set to run; see `Programs`
  bool exact_coupling = true;
  bool match_native_rng = false;  ///< random numbers are those of the whole batch's run
  bool keep_outputs = false;
  bool rehearses = false;  ///< sizes are measured: nothing is handed out, nor are rows looked at
  bool goes_back_again = false;  ///< backward may run more than once: recordings are kept for it
  bool reentrant = false;        ///< may run inside another step of this thread
  std::shared_ptr<Trimming> trimming;  ///< of rows that are sorted by length; null: as they are
  at::Tensor loss_scale;               ///< undefined means 1
  std::function<void(const MicroBatch&)> on_micro_batch;
  std::function<void()> interrupt;

  int64_t batch_size() const noexcept { return inputs->size; }
  bool looks_at_rows() const noexcept { return exact_coupling && !rehearses; }
  /// Whether a forward over all rows would see them in another order than the caller's.
  bool is_reordered() const noexcept;
};

/// Rows beside these `rows`, another number of them, whose forward tells what follows the samples.
Rows other_rows(Rows rows, int64_t batch_size);

/// The devices whose random generators a step may draw from.
std::vector<at::Device> devices_of(const Problem& problem);

/// What a step needs beside the gradients that are there, where none is sparse.
int64_t gradient_bytes(const std::vector<NamedParameter>& parameters, at::Device device);

/// Tensors, without those that are not defined.
std::vector<at::Tensor> buffers_of(const Problem& problem);

}  // namespace infinitybatch
