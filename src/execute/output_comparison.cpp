#include "execute/output_comparison.hpp"

#include "core/bits.hpp"
#include "execute/checkpoint_recorder.hpp"
#include "execute/external_loss.hpp"
#include "execute/whole_outputs.hpp"
#include "tape/mismatch.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <string>

namespace infinitybatch {

void OutputComparison::compare(Rows rows, const Batch& outputs) {
  if (ExternalLoss* loss = problem_.loss.external()) return loss->compare(rows, outputs);
  if (whole_ != nullptr) return whole_->compare(rows, outputs);
  const auto expected = expected_.find(rows.begin);
  if (expected == expected_.end()) return;
  const at::NoGradGuard no_grad;
  if (!differs_.defined()) {
    differs_ = at::zeros({}, at::TensorOptions().dtype(at::kBool).device(problem_.device));
  }
  note_differences(expected->second, outputs, differs_);
  expected_.erase(expected);
}

void OutputComparison::check(bool replayed) const {
  if (differs_.defined() && differs_.item<bool>()) {
    refuse_segments("a replay of it gave other outputs than its recording");
  }
  if (whole_ == nullptr || !whole_->differ()) return;
  if (strategy_.is_cut()) {
    throw Unsupported(
        std::string(strategy_.per_micro_batch()
                        ? "forward"
                        : "the part of forward after the last op of the whole batch") +
        " gave other outputs when it was replayed, so its gradient would not belong "
        "to the loss; a kernel in it is not deterministic");
  }
  if (replayed) {
    throw tape::Mismatch("a replayed forward gave other outputs than its recording");
  }
  throw forward_differs("the loss");
}

Unsupported forward_differs(const std::string& whose) {
  return Unsupported(
      "forward gave other outputs when it ran again on the same rows under the same random state, "
      "so its gradient would not belong to " +
      whose +
      ". It depends on a kernel that is not deterministic, on code that torch.compile compiled "
      "again in between (torch.compile(model, dynamic=True)), or on state other than parameters, "
      "buffers and torch's, NumPy's or Python's random numbers: train() or eval() called before "
      "backward, say, or what cuDNN draws for nn.LSTM or nn.GRU with dropout "
      "(torch.backends.cudnn.flags(enabled=False) around forward leaves that to torch)");
}

}  // namespace infinitybatch
