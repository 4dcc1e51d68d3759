#include "execute/denominator.hpp"

#include "core/host_number.hpp"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/accumulate.h>

#include <algorithm>

namespace infinitybatch {
namespace {

/// Targets are read in pieces of about this many elements, so that masks over them stay small.
constexpr int64_t kElements = int64_t{1} << 14;

int64_t rows_per_piece(const Problem& problem) {
  int64_t widest = 1;
  if (problem.targets->uniform) {
    for (const std::vector<int64_t>& sizes : problem.targets->dims) {
      widest = std::max(widest, c10::multiply_integers(sizes));
    }
  } else {
    for (const at::Tensor& tensor : problem.targets->rows(0, 1).tensors()) {
      widest = std::max(widest, tensor.numel());
    }
  }
  return std::clamp<int64_t>(kElements / widest, 1, problem.batch_size());
}

bool has_double(const at::Device& device) {
  return device.type() != at::kMPS;
}

}  // namespace

Denominator::Denominator(const Problem& problem) {
  const at::NoGradGuard no_grad;
  const int64_t step = rows_per_piece(problem);
  for (int64_t begin = 0; begin < problem.batch_size(); begin += step) {
    const int64_t end = std::min(begin + step, problem.batch_size());
    const DenominatorPart part =
        problem.loss.separable()->denominator(problem.targets->rows(begin, end), end - begin);
    if (std::holds_alternative<Undivided>(part)) {
      undivided_ = true;
      return;
    }
    if (const double* number = std::get_if<double>(&part)) {
      known_ += *number;
      continue;
    }
    const at::Tensor& tensor = std::get<at::Tensor>(part);
    if (problem.device.is_cpu()) {
      if (const std::optional<double> number = host_number(tensor)) {
        known_ += *number;
        continue;
      }
    }
    const at::Tensor exact =
        tensor.to(has_double(tensor.device()) ? at::kDouble : at::kFloat).reshape({});
    computed_ = computed_.defined() ? computed_.add(exact) : exact;
  }
  if (computed_.defined()) computed_ = computed_.add(known_).to(problem.device);
}

at::Tensor Denominator::divide(const at::Tensor& sum) const {
  if (undivided_) return sum;
  if (!computed_.defined()) return sum.div(known_);
  // The same for every micro-batch, mostly.
  const bool fits = divisor_.defined() && divisor_.device() == sum.device() &&
                    divisor_.scalar_type() == sum.scalar_type();
  if (!fits) divisor_ = computed_.to(sum.device(), sum.scalar_type());
  return sum.div(divisor_);
}

}  // namespace infinitybatch
