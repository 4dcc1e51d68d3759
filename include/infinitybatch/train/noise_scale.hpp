#pragma once

#include <infinitybatch/train/callback.hpp>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace infinitybatch {

struct StepReport;

/// The gradient noise scale (McCandlish et al. 2018, the "simple" one): the trace of the covariance
/// of one sample's gradient over the squared norm of the true gradient. Measured from the gradients
/// that micro-batches add, at no further pass. Batches far below it waste steps, far above it
/// samples.
///
///     auto noise = std::make_shared<NoiseScale>();
///     Trainer trainer(std::move(step), optimizer, loader, {.callbacks = noise});
///     trainer.run(3);
///     noise->largest_useful_batch();
///
/// For losses that are sums over samples of models that do not couple them, steps of "stream".
class NoiseScale final : public Callback {
 public:
  /// \param decay of the averages over steps, at least 0 and below 1
  /// \throws InvalidArgument for another
  explicit NoiseScale(double decay = 0.99);
  ~NoiseScale() override;

  /// In a loop of your own: before a step of this thread, after it, and in place of that where it
  /// has failed.
  void begin();
  /// Steps of one micro-batch say nothing and are not counted.
  /// \param gradient_scale by which the step's gradients were multiplied (a GradScaler's)
  /// \throws Unsupported where samples are coupled, so that micro-batches are no samples of the
  ///         gradient
  void end(const StepReport& report, double gradient_scale = 1);
  void discard();

  /// In samples. Infinite where the gradient cannot be told from noise yet.
  /// \throws StateError before the first step of several micro-batches
  double noise_scale() const;
  /// The largest logical batch in which each sample is worth at least `efficiency` of what it is
  /// worth in a small one: noise_scale * (1 / efficiency - 1), the noise scale itself at one half.
  /// \throws InvalidArgument unless 0 < efficiency < 1; StateError as `noise_scale`
  double largest_useful_batch(double efficiency = 0.5) const;
  /// Steps that were measured.
  int64_t steps() const noexcept { return averages_.steps; }

  struct Averages {
    double variance = 0;  ///< trace of the covariance of one sample's gradient, weighted
    double square = 0;    ///< squared norm of the true gradient, weighted alike
    int64_t steps = 0;
  };
  /// All that goes on in another process.
  const Averages& averages() const noexcept { return averages_; }
  void restore(const Averages& averages) noexcept { averages_ = averages; }

  void on_batch_begin(const events::BatchBegin& event) override;
  void on_batch_end(const events::BatchEnd& event) override;
  void on_failure(const events::Failure& event) override;

 private:
  class Meter;
  std::unique_ptr<Meter> meter_;
  double decay_;
  Averages averages_;
};

}  // namespace infinitybatch
