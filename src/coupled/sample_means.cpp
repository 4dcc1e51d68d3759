#include "coupled/sample_means.hpp"

#include "core/tensor_memory.hpp"
#include "tape/op_bus.hpp"

#include <algorithm>
#include <string_view>
#include <utility>

namespace infinitybatch::coupled {
namespace {

constexpr std::string_view kInstanceNorm = "aten::instance_norm";
// input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, cudnn_enabled
constexpr size_t kInstanceNormArguments = 9;

bool in_same_memory(const at::Tensor& a, const at::Tensor& b) {
  return storage_of(a) != nullptr && storage_of(a) == storage_of(b);
}

}  // namespace

void SampleMeans::observe(const tape::SeenOp& op) {
  if (op.name() != kInstanceNorm) {
    if (!means_.empty()) look_for_reads(op);
    return;
  }
  auto inputs = op.inputs();
  if (inputs.size() < kInstanceNormArguments) return;
  inputs = inputs.slice(inputs.size() - kInstanceNormArguments);
  const bool trains = inputs[5].isBool() && inputs[5].toBool();
  if (!trains || !inputs[0].isTensor() || inputs[0].toTensor().dim() == 0) return;
  for (const size_t statistic : {3, 4}) note(inputs[statistic], inputs[0].toTensor().size(0));
}

void SampleMeans::note(const c10::IValue& buffer, int64_t count) {
  if (!buffer.isTensor() || !buffer.toTensor().defined()) return;
  const at::Tensor& tensor = buffer.toTensor();
  const auto known = std::find_if(means_.begin(), means_.end(), [&](const SampleMean& mean) {
    return in_same_memory(mean.buffer, tensor);
  });
  if (known == means_.end()) {
    means_.push_back({tensor, count});
  } else if (known->count != count) {
    known->count = 0;  // a layer that is used twice, on more rows the second time
  }
}

void SampleMeans::look_for_reads(const tape::SeenOp& op) {
  const auto look = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    for (SampleMean& mean : means_) {
      if (in_same_memory(mean.buffer, tensor)) mean.count = 0;
    }
  };
  for (const c10::IValue& input : op.inputs()) {
    if (input.isTensor()) {
      look(input.toTensor());
    } else if (input.isTensorList()) {
      for (const at::Tensor& each : input.toTensorVector()) look(each);
    }
  }
}

std::vector<SampleMean> SampleMeans::take() {
  return std::exchange(means_, {});
}

}  // namespace infinitybatch::coupled
