#include "loss/class_weights.hpp"

#include "core/host_number.hpp"
#include "loss/arguments.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>

namespace infinitybatch::losses {
namespace {

/// How many of the targets belong to each class, in a type that can be multiplied with weights.
/// Counted by adding ones, not by bincount, which waits for the device; the sums are integers and
/// exact in any order. 17 bytes for each target while it runs.
at::Tensor class_counts(const at::Tensor& targets, int64_t classes, int64_t ignore_index) {
  const at::Tensor index = targets.reshape(-1);
  const at::Tensor counted = index.ne(ignore_index);
  return at::zeros({classes}, index.options())
      .index_add_(0, index.mul(counted), counted.to(at::kLong));
}

}  // namespace

bool are_probabilities(const at::Tensor& targets) {
  return targets.is_floating_point();
}

DenominatorPart weight_of_indices(const at::Tensor& targets, const at::Tensor& weight,
                                  int64_t ignore_index) {
  const at::Tensor index = targets.to(at::kLong);  // uint8 has no -100
  if (!weight.defined()) {
    if (const auto count = host_count_without(index, ignore_index)) {
      return static_cast<double>(*count);
    }
    return index.ne(ignore_index).sum();
  }
  at::Tensor counts = class_counts(index, weight.numel(), ignore_index);
  // Host and device meet on the device: copies towards it wait for nothing. What travels is small,
  // the classes' counts or weights.
  const at::Device device = counts.is_cpu() ? weight.device() : counts.device();
  const at::ScalarType type = accumulation_type(device);
  counts = counts.to(device, type, /*non_blocking=*/!device.is_cpu());
  // Of pinned weights the copy would go on after the step, when their owner may change them.
  const bool async = !device.is_cpu() && !weight.is_pinned();
  const at::Tensor weights = weight.reshape(-1).to(device, type, /*non_blocking=*/async);
  // A class that is not there counts nothing, whatever its weight: no 0·inf.
  return counts.mul(weights).masked_fill(counts.eq(0), 0).sum();
}

void check_smoothing(const std::string& name, double label_smoothing) {
  if (label_smoothing >= 0 && label_smoothing <= 1) return;
  throw InvalidArgument(name + ": label_smoothing must be between 0 and 1, not " +
                        std::to_string(label_smoothing));
}

}  // namespace infinitybatch::losses
