#pragma once

#include "coupled/whole_batch_op.hpp"

#include <vector>

namespace infinitybatch::coupled {

/// `aten::batch_norm` in training mode over all micro-batches.
///
/// Forward: counts, means and sums of squared differences of micro-batches are merged by the
/// formula of Chan, Golub and LeVeque (1979), in fp64 where the device has it. Each micro-batch is
/// then normalised by the merged statistics with torch's own kernel, in the mode in which it takes
/// statistics as given.
///
/// Backward: with x̂ = (x − μ)/σ, N elements for each channel, and y = γ x̂ + β, the gradient of x is
///     γ/σ · (dy − (Σ dy + x̂ Σ dy x̂) / N)        (Ioffe and Szegedy, 2015)
/// The first term is what the kernel gives for given statistics; the sums run over the whole batch,
/// so that the rest is added once all micro-batches have been there (`correct`).
class BatchNorm final : public WholeBatchOp {
 public:
  /// \param named whether it has a weight or running statistics of the model's, so that it is
  ///              certain that its channels are channels
  explicit BatchNorm(bool named) : named_(named) {}
  void collect(Rows rows, const Arguments& arguments) override;
  void combine(SettledBuffers& buffers) override;
  at::Tensor apply(Rows rows, const Arguments& arguments, std::vector<at::Tensor>& leaves) override;
  void begin_backward(bool keep) override;
  void collect_gradient(Rows rows, const std::vector<at::Tensor>& leaves) override;
  void combine_gradients(autograd::GradientSinks& sinks) override;
  size_t corrected() const override { return scale_.defined() ? 1 : 0; }
  void correct(Rows rows, size_t which, const at::Tensor& input,
               at::Tensor& gradient) const override;

 private:
  bool named_;
  void merge(int64_t count, const at::Tensor& mean, const at::Tensor& variance);
  void merge_waiting();
  void add_waiting_gradients();
  void update_running(SettledBuffers& buffers, const at::Tensor& buffer, const at::Tensor& value);

  at::ScalarType type_ = at::kFloat;  // of statistics that kernels take
  bool wants_gradient_ = false;       // the input, of any micro-batch
  bool known_ = false;                // the fields below are set
  int64_t channels_ = 0;
  at::Tensor running_mean_;
  at::Tensor running_var_;
  double momentum_ = 0;
  double eps_ = 0;

  at::Tensor dummy_;           // running statistics that nobody reads
  int64_t waiting_count_ = 0;  // elements of each micro-batch that waits to be merged
  std::vector<at::Tensor> waiting_means_;
  std::vector<at::Tensor> waiting_variances_;
  int64_t count_ = 0;      // elements for each channel
  at::Tensor mean_;        // in the type of sums, (channels)
  at::Tensor squares_;     // sums of squared differences from the mean
  at::Tensor given_mean_;  // in the type that kernels take
  at::Tensor given_var_;   // biased
  at::Tensor zeros_;       // with a gradient of its own, where γ or β has none

  std::vector<at::Tensor> waiting_gradients_;  // of γ and β, of one micro-batch after the other
  at::Tensor weight_;                          // γ, detached; undefined where there is none
  at::Tensor sums_;                            // (2, channels): Σ dy x̂ and Σ dy
  at::Tensor scale_;  // of (x − μ), and a shift: what is still missing in the gradient
  at::Tensor shift_;
};

}  // namespace infinitybatch::coupled
