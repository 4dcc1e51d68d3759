#include "autograd/gradient_norms.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/train/noise_scale.hpp>

#include <cmath>
#include <limits>
#include <numeric>
#include <sstream>

namespace infinitybatch {
namespace {

std::string as_typed(double number) {
  std::ostringstream text;
  text << number;
  return text.str();
}

}  // namespace

class NoiseScale::Meter : public autograd::NormMeter {};

NoiseScale::NoiseScale(double decay) : decay_(decay) {
  if (decay >= 0 && decay < 1) return;
  throw InvalidArgument("decay is " + as_typed(decay) + "; it must be at least 0 and below 1");
}
NoiseScale::~NoiseScale() = default;

void NoiseScale::begin() {
  meter_ = std::make_unique<Meter>();
}

void NoiseScale::discard() {
  meter_.reset();
}

void NoiseScale::end(const StepReport& report, double gradient_scale) {
  const auto meter = std::move(meter_);
  if (!meter) throw StateError("NoiseScale was not begun before this step; call begin() first");
  if (report.strategy != "stream") {
    throw Unsupported(
        "NoiseScale reads each micro-batch's own gradient, and this step ran as \"" +
        report.strategy + "\"" +
        (report.strategy_reason.empty() ? "" : " (" + report.strategy_reason + ")") +
        "; train without NoiseScale, or with a loss that is a sum over samples and a model that "
        "does not couple them");
  }
  const auto norms = meter->take();
  const auto& sizes = report.micro_batch_sizes;
  if (!norms || norms->micro_batches.size() != sizes.size() || sizes.size() < 2) return;
  const auto samples = static_cast<double>(std::accumulate(sizes.begin(), sizes.end(), int64_t{0}));
  // Analysis of variance: micro-batches are groups of samples, whose shares of the gradient are
  // sums over them divided by all.
  double between = -samples * norms->sum;
  for (size_t i = 0; i < sizes.size(); ++i) {
    between += samples * samples * norms->micro_batches[i] / static_cast<double>(sizes[i]);
  }
  const double scale = gradient_scale * gradient_scale;
  const double variance = between / static_cast<double>(sizes.size() - 1) / scale;
  const double square = norms->sum / scale - variance / samples;
  if (!std::isfinite(variance) || !std::isfinite(square)) return;  // a GradScaler skips such a step
  averages_.variance = decay_ * averages_.variance + (1 - decay_) * variance;
  averages_.square = decay_ * averages_.square + (1 - decay_) * square;
  ++averages_.steps;
}

double NoiseScale::noise_scale() const {
  if (averages_.steps == 0) {
    throw StateError(
        "no step of two or more micro-batches was measured yet; train a step whose "
        "micro_batch_size is at most half of the batch");
  }
  if (averages_.square <= 0) return std::numeric_limits<double>::infinity();
  return std::max(averages_.variance, 0.0) / averages_.square;
}

double NoiseScale::largest_useful_batch(double efficiency) const {
  if (!(efficiency > 0 && efficiency < 1)) {
    throw InvalidArgument("efficiency is " + as_typed(efficiency) +
                          "; it must be above 0 and below 1");
  }
  return noise_scale() * (1 / efficiency - 1);
}

void NoiseScale::on_batch_begin(const events::BatchBegin& /*event*/) {
  begin();
}
void NoiseScale::on_batch_end(const events::BatchEnd& event) {
  end(*event.report);
}
void NoiseScale::on_failure(const events::Failure& /*event*/) {
  discard();
}

}  // namespace infinitybatch
