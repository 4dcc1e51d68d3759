#include "autograd/gradient_norms.hpp"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

namespace infinitybatch::autograd {
namespace {

using Published = std::shared_ptr<NormCounter>;

/// Of this thread's meters. Weak: a meter may end on another thread.
std::vector<std::weak_ptr<Published>>& norm_meters() {
  thread_local std::vector<std::weak_ptr<Published>> meters;
  std::erase_if(meters, [](const auto& meter) { return meter.expired(); });
  return meters;
}

}  // namespace

void NormCounter::next_micro_batch() {
  const std::lock_guard<std::mutex> lock(mutex_);
  micro_batches_.emplace_back();
}

void NormCounter::add_to(Sums& sums, const at::Tensor& gradient) {
  if (!gradient.defined() || gradient.numel() == 0) return;
  const at::NoGradGuard no_grad;
  const at::Tensor values = gradient.is_sparse() ? gradient.coalesce()._values() : gradient;
  const at::ScalarType type = values.scalar_type();
  const bool half = type == at::kHalf || type == at::kBFloat16;
  at::Tensor square = at::linalg_vector_norm(values, 2, std::nullopt, /*keepdim=*/false,
                                             half ? std::optional(at::kFloat) : std::nullopt);
  square.mul_(square);
  for (at::Tensor& known : sums) {
    if (known.device() == square.device() && known.scalar_type() == square.scalar_type()) {
      known.add_(square);
      return;
    }
  }
  sums.push_back(std::move(square));
}

void NormCounter::add(const at::Tensor& gradient, int64_t& last) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto now = static_cast<int64_t>(micro_batches_.size());
  if (now == 0 || ended_) return;
  in_parts_ = in_parts_ || last == now;
  last = now;
  add_to(micro_batches_.back(), gradient);
}

void NormCounter::end(const std::vector<at::Tensor>& sums) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ended_ = true;
  if (micro_batches_.empty()) return;
  for (const at::Tensor& sum : sums) add_to(sum_, sum);
}

double NormCounter::total(const Sums& sums) {
  double all = 0;
  for (const at::Tensor& sum : sums) all += sum.item<double>();
  return all;
}

std::optional<GradientNorms> NormCounter::read() const {
  if (micro_batches_.empty() || in_parts_) return std::nullopt;
  GradientNorms norms;
  for (const Sums& sums : micro_batches_) norms.micro_batches.push_back(total(sums));
  norms.sum = total(sum_);
  return norms;
}

NormMeter::NormMeter() : last_(std::make_shared<Published>()) {
  norm_meters().push_back(last_);
}

std::optional<GradientNorms> NormMeter::take() {
  const Published counter = std::exchange(*last_, nullptr);
  return counter ? counter->read() : std::nullopt;
}

std::shared_ptr<NormCounter> NormMeter::counter() {
  return norm_meters().empty() ? nullptr : std::make_shared<NormCounter>();
}

void NormMeter::publish(const std::shared_ptr<NormCounter>& counter) {
  for (const auto& meter : norm_meters()) {
    if (const auto last = meter.lock()) *last = counter;
  }
}

}  // namespace infinitybatch::autograd
