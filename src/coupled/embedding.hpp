#pragma once

#include <infinitybatch/coupled/whole_batch_op.hpp>

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

}  // namespace infinitybatch::coupled
