#pragma once

#include "coupled/part_of_batch.hpp"
#include "coupled/whole_batch_op.hpp"

#include <infinitybatch/coupled/across_batch.hpp>

#include <map>
#include <memory>
#include <optional>

namespace infinitybatch::coupled {

/// `across_batch` over all micro-batches.
class AcrossBatch final : public WholeBatchOp {
 public:
  /// \param number of its function in the recording
  explicit AcrossBatch(int64_t number);
  void collect(Rows rows, const Arguments& arguments) override;
  void combine(SettledBuffers& buffers) override;
  at::Tensor apply(Rows rows, const Arguments& arguments, std::vector<at::Tensor>& leaves) override;
  void begin_backward(bool keep) override;
  void collect_gradient(Rows rows, const std::vector<at::Tensor>& leaves) override;
  void combine_gradients(autograd::GradientSinks& sinks) override;
  size_t corrected() const override { return gradients_.size(); }
  void correct(Rows rows, size_t which, const at::Tensor& input,
               at::Tensor& gradient) const override;

 private:
  struct Part {
    std::vector<at::Tensor> inputs;  // until they are joined
    std::vector<bool> wants_gradient;
    std::vector<int64_t> begins;  // first row in each joined input
    std::vector<int64_t> sizes;
    at::Tensor gradient;  // of these rows of the result
  };

  AcrossBatchFunction function_;
  std::optional<PartOfBatch::Facts> part_;  // of the batch that the recording was made of
  std::shared_ptr<bool> ran_;               // on all samples, while forward was recorded
  int64_t samples_ = 0;                     // so far: a rehearsal has not all of them
  std::map<int64_t, Part> parts_;           // by first sample
  std::vector<at::Tensor> inputs_;     // joined, leaves; those of any rows that do require grad
  at::Tensor result_;                  // with its graph
  bool keep_ = false;                  // the result's graph, for another backward pass
  std::vector<at::Tensor> gradients_;  // of the joined inputs; undefined where none is wanted
};

}  // namespace infinitybatch::coupled
