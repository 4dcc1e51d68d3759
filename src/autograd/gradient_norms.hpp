#pragma once

#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace infinitybatch::autograd {

/// Squared norms of what the micro-batches of one step add to the gradient, over all parameters.
struct GradientNorms {
  std::vector<double> micro_batches;
  double sum = 0;  ///< of the sum of all micro-batches
};

/// Collects them while gradients come in: no further pass, no copy of a gradient, and no wait for
/// the device. Several of its threads may add.
class NormCounter {
 public:
  void next_micro_batch();
  /// \param[in,out] last the micro-batch that this parameter's gradient came in for before
  void add(const at::Tensor& gradient, int64_t& last);
  /// Once all are there; \param sums of each parameter, undefined where it got no gradient
  void end(const std::vector<at::Tensor>& sums);
  bool ended() const noexcept { return ended_; }
  /// Nothing where the step did not run micro-batch by micro-batch, or one's gradient of a
  /// parameter came in several parts (checkpoints that run backward within backward).
  std::optional<GradientNorms> read() const;

 private:
  /// Of one micro-batch: a sum for each device and type.
  using Sums = std::vector<at::Tensor>;
  static void add_to(Sums& sums, const at::Tensor& gradient);
  static double total(const Sums& sums);

  std::mutex mutex_;
  std::vector<Sums> micro_batches_;
  Sums sum_;
  bool ended_ = false;
  bool in_parts_ = false;
};

/// While one lives, steps of the thread that made it count norms.
class NormMeter {
 public:
  NormMeter();
  /// Of the last step that handed out its gradients.
  std::optional<GradientNorms> take();

  /// For a step that begins on this thread; null where nobody asks.
  static std::shared_ptr<NormCounter> counter();
  /// For one that hands out its gradients.
  static void publish(const std::shared_ptr<NormCounter>& counter);

 private:
  std::shared_ptr<std::shared_ptr<NormCounter>> last_;
};

}  // namespace infinitybatch::autograd
