#include "train/evaluate.hpp"

#include "interrupt.hpp"
#include "train/amp.hpp"
#include "train/training.hpp"

#include <infinitybatch/loss/criteria.hpp>
#include <infinitybatch/train/evaluation.hpp>

#include <ATen/Functions.h>

#include <algorithm>

namespace infinitybatch::app {
namespace {

/// Evaluation mode while it lives.
class EvaluationMode {
 public:
  explicit EvaluationMode(Network& network) : network_(network) { network_.eval(); }
  ~EvaluationMode() { network_.train(); }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;

 private:
  Network& network_;
};

}  // namespace

Scores evaluate(const std::shared_ptr<Network>& network, const Split& split, int64_t slice,
                const std::function<void(const MicroBatch&)>& each, bool amp) {
  const EvaluationMode mode(*network);
  double right = 0;
  double count = 0;
  Options options;
  options.micro_batch_size = std::min(slice, split.size);
  options.interrupt = check_interrupt;
  options.on_micro_batch = [&](const MicroBatch& rows) {
    const at::Tensor& targets = rows.targets.tensor();
    right += rows.outputs.tensor().argmax(1).eq(targets).sum().item<double>();
    count += static_cast<double>(targets.numel());
    if (each) each(rows);
  };
  Evaluation evaluation(model_of(network, amp), losses::cross_entropy(), std::move(options));
  const at::Tensor all = at::arange(split.size, at::kLong);
  evaluation.add(source_of(split.inputs, all), source_of(split.targets, all));
  return {evaluation.loss(), right / count};
}

}  // namespace infinitybatch::app
