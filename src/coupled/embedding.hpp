#pragma once

#include "coupled/whole_batch_op.hpp"

namespace infinitybatch::coupled {

/// `aten::embedding` with `scale_grad_by_freq`: backward divides a word's gradient by how often the
/// word occurs in the whole batch. Its forward couples nothing.
class ScaledEmbedding final : public WholeBatchOp {
 public:
  void collect(Rows rows, const Arguments& arguments) override;
  void combine(SettledBuffers& buffers) override;
  at::Tensor apply(Rows rows, const Arguments& arguments, std::vector<at::Tensor>& leaves) override;
  void collect_gradient(Rows, const std::vector<at::Tensor>&) override {}
  void combine_gradients(autograd::GradientSinks&) override {}

 private:
  at::Tensor counts_;  // occurrences of each word, int64
};

/// `aten::embedding_bag` with `scale_grad_by_freq`, mode sum or mean. What backward divides a
/// word's gradient by is asked of torch's own kernel, for all indices of the batch: on the CPU it
/// is not the word's own count, but that of the word at another place among the sorted indices.
class ScaledEmbeddingBag final : public WholeBatchOp {
 public:
  void collect(Rows rows, const Arguments& arguments) override;
  void combine(SettledBuffers& buffers) override;
  at::Tensor apply(Rows rows, const Arguments& arguments, std::vector<at::Tensor>& leaves) override;
  void collect_gradient(Rows, const std::vector<at::Tensor>&) override {}
  void combine_gradients(autograd::GradientSinks&) override {}

 private:
  std::vector<at::Tensor> indices_;  // of each micro-batch, until `combine`
  at::TensorOptions weight_;
  int64_t words_ = 0;
  std::optional<int64_t> padding_;
  at::Tensor share_;  // of its gradient that each word gets
};

}  // namespace infinitybatch::coupled
