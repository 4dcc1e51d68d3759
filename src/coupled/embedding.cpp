#include "embedding.hpp"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

namespace infinitybatch::coupled {
namespace {

// aten::embedding(weight, indices, padding_idx, scale_grad_by_freq, sparse)
enum Argument : size_t { kWeight, kIndices, kPadding, kScale, kSparse };

}  // namespace

void ScaledEmbedding::collect(Rows /*rows*/, const Arguments& arguments) {
  const at::NoGradGuard no_grad;
  const at::Tensor indices = arguments[kIndices].toTensor().detach().reshape({-1}).to(at::kLong);
  if (!counts_.defined()) {
    counts_ = at::zeros({arguments[kWeight].toTensor().size(0)}, indices.options());
  }
  counts_.index_add_(0, indices, at::ones_like(indices));
}

void ScaledEmbedding::combine(SettledBuffers& /*buffers*/) {}

at::Tensor ScaledEmbedding::apply(Rows /*rows*/, const Arguments& arguments,
                                  std::vector<at::Tensor>& /*leaves*/) {
  const at::Tensor weight = arguments[kWeight].toTensor();
  const at::Tensor indices = arguments[kIndices].toTensor();
  const at::Tensor words = at::embedding(weight, indices, arguments[kPadding].toInt(),
                                         /*scale_grad_by_freq=*/false, arguments[kSparse].toBool());
  if (!words.requires_grad()) return words;
  const at::Tensor fixed = words.detach();
  const at::Tensor share = counts_.index_select(0, indices.reshape({-1}).to(at::kLong))
                               .to(words.scalar_type())
                               .reciprocal()
                               .reshape(indices.sizes())
                               .unsqueeze(-1);
  // The words themselves, to the bit, with a share of their gradient.
  return fixed + (words - fixed) * share;
}

}  // namespace infinitybatch::coupled
