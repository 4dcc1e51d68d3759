#include "execute/mixing_experiment.hpp"

#include "autograd/engine.hpp"
#include "core/batch_form.hpp"
#include "core/collectives.hpp"
#include "core/foreign_exception.hpp"
#include "core/out_of_memory.hpp"
#include "core/rng.hpp"
#include "core/sample_dims.hpp"
#include "coupled/row_errors.hpp"
#include "coupled/whole_batch_op.hpp"
#include "tape/mixing.hpp"
#include "tape/recorder.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/memory/limit.hpp>

#include <ATen/Functions.h>

#include <algorithm>
#include <exception>
#include <map>
#include <memory>
#include <utility>

namespace infinitybatch {
namespace {

/// Ops that see the whole batch, while one micro-batch stands for it: they combine its own rows,
/// and keep what they found when other rows stand there.
class SettledOps {
 public:
  SettledOps(const tape::Tape& tape, int64_t rows) : tape_(tape), rows_{0, rows} {}

  /// See tape::SettledOp.
  bool settle(uint32_t index, std::vector<c10::IValue>& stack, const std::vector<int64_t>* order) {
    const tape::Op& op = tape_.ops[index];
    if (coupled::draws_for_all(tape_, op) || !coupled::is_provisional(tape_, op)) return false;
    std::unique_ptr<coupled::WholeBatchOp>& settled = ops_[index];
    if (order == nullptr) {
      settled = coupled::stand_in(tape_, op);
      settled->collect(rows_, stack);
      coupled::SettledBuffers buffers;
      settled->combine(buffers);
    }
    std::vector<at::Tensor> leaves;
    at::Tensor result = settled->apply(rows_, stack, leaves);
    if (order != nullptr && op.facts->name() == "infinitybatch::across_batch") {
      // Each sample gets what was computed for it.
      if (result.size(0) != rows_.size()) throw Unsupported("rows are no samples");
      result = exchanged(result, 0, *order);
    }
    stack.assign(1, std::move(result));
    return true;
  }

 private:
  const tape::Tape& tape_;
  Rows rows_;
  std::map<uint32_t, std::unique_ptr<coupled::WholeBatchOp>> ops_;
};

/// Nothing, too, where there is no room to compare samples.
std::optional<Exchanges> exchanges_that_fit(const Batch& inputs, int64_t rows) {
  try {
    return exchanges_of(inputs, rows);
  } catch (...) {
    return std::nullopt;
  }
}

/// Along a dimension of its own, or with positions in one.
bool may_follow(at::IntArrayRef sizes, int64_t rows) {
  return std::find(sizes.begin(), sizes.end(), rows) != sizes.end() ||
         (sizes.size() > 1 && sizes[0] > 0 && sizes[0] % rows == 0);
}

const void* node_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.requires_grad() ? tensor.grad_fn().get() : nullptr;
}

}  // namespace

MixingExperiment::MixingExperiment(bool* examined, std::vector<at::Device> devices,
                                   int64_t batch_size)
    : examined_(examined), devices_(std::move(devices)), batch_size_(batch_size) {}

bool MixingExperiment::wants(Rows rows) const noexcept {
  return examined_ != nullptr && !*examined_ && !pending_ &&
         rows.size() > (unsure_of_two_ ? 2 : 1) && rows.size() < batch_size_;
}

Batch MixingExperiment::record(Rows rows, const Batch& inputs,
                               const std::vector<at::Tensor>& buffers,
                               const std::function<Batch()>& forward) {
  std::optional<Exchanges> exchanges = exchanges_that_fit(inputs, rows.size());
  if (!exchanges) return forward();
  tape::Recorder recorder(inputs, buffers, devices_);
  Batch outputs;
  {
    const tape::Recorder::Scope recording(recorder);
    outputs = forward();
  }
  try {
    pending_ = Pending{
        rows, std::move(*exchanges),    without_tensors(inputs), recorder.finish(outputs), {},
        {},   time_first_advice(inputs)};
  } catch (...) {
    const std::exception_ptr error = std::current_exception();
    // The step itself needs no tape: another micro-batch is looked at.
    if (is_out_of_memory(error)) return outputs;
    if (!coupled::may_be_of_rows(error)) throw;
  }
  if (!pending_ || pending_->tape.opaque) {
    pending_.reset();
    *examined_ = true;
    return outputs;
  }
  for (const Leaf& leaf : outputs.leaves()) pending_->nodes.push_back(node_of(leaf.tensor));
  pending_->compared.resize(outputs.leaves().size(), false);
  return outputs;
}

void MixingExperiment::read_by(const at::Tensor& loss) {
  if (!pending_ || pending_->nodes.empty()) return;
  const std::vector<const void*> nodes = std::exchange(pending_->nodes, {});
  if (pending_->tape.opaque || !loss.requires_grad()) return;
  autograd::walk_graph({loss}, [&](const torch::autograd::Node& node) {
    for (size_t i = 0; i < nodes.size(); ++i) {
      if (nodes[i] == &node) pending_->compared[i] = true;
    }
  });
}

void MixingExperiment::read_by_loss(const std::vector<bool>& read) {
  if (!pending_) return;
  for (size_t i = 0; i < read.size() && i < pending_->compared.size(); ++i) {
    pending_->compared[i] = read[i];
  }
}

void MixingExperiment::take(Rows rows, const Batch& inputs, const tape::Tape& tape) {
  if (tape.opaque) *examined_ = true;
  if (tape.opaque || tape.result_values.empty()) return;
  std::optional<Exchanges> exchanges = exchanges_that_fit(inputs, rows.size());
  if (!exchanges) return;
  pending_ = Pending{rows, std::move(*exchanges),    without_tensors(inputs), tape, {},
                     {},   time_first_advice(inputs)};
  pending_->compared.resize(tape.result_values.size(), true);
}

bool MixingExperiment::may_play() const {
  const tape::Tape& tape = pending_->tape;
  // Other ranks would not answer.
  return std::none_of(tape.ops.begin(), tape.ops.end(), [](const tape::Op& op) {
    return op.facts != nullptr && is_collective(op.facts->name());
  });
}

std::optional<Rows> MixingExperiment::may_count() const {
  if (!pending_ || pending_->met_others) return std::nullopt;
  if (!tape::likely_counts_rows(numbers(), pending_->rows.size())) return std::nullopt;
  return pending_->rows;
}

std::vector<tape::GivenNumbers> MixingExperiment::numbers() const {
  return tape::numbers_for_samples(pending_->tape, pending_->inputs, pending_->compared);
}

bool MixingExperiment::unsure() const {
  return pending_->rows.size() == 2 && !pending_->met_others && tape::may_count_rows(numbers(), 2);
}

bool MixingExperiment::awaits(Rows rows) const {
  return pending_ && !pending_->met_others && rows.size() != pending_->rows.size() &&
         tape::has_numbers(numbers());
}

void MixingExperiment::meet_others(int64_t rows, const Batch& inputs, const tape::Tape& tape,
                                   const Batch& outputs) {
  if (!pending_ || rows == pending_->rows.size()) return;
  pending_->met_others = true;
  // Of one number for all samples (a loss of the model's own) its denominator tells.
  std::vector<bool> follow = pending_->compared;
  for (size_t i = 0; i < follow.size() && i < outputs.leaves().size(); ++i) {
    const at::Tensor& tensor = outputs.leaves()[i].tensor;
    follow[i] = follow[i] && tensor.defined() && may_follow(tensor.sizes(), rows);
  }
  pending_->counting = tape::counts_rows(
      tape::numbers_for_samples(pending_->tape, pending_->inputs, follow), pending_->rows.size(),
      tape::numbers_for_samples(tape, inputs, follow), rows);
}

void MixingExperiment::meet_no_others() {
  if (pending_) pending_->met_others = true;
}

std::optional<tape::Mixing> MixingExperiment::find_mixing(
    const std::function<Batch(Rows)>& load) const {
  std::optional<tape::Mixing> mixing;
  std::optional<RngSnapshot> random;  // of ops that are the user's, too
  std::exception_ptr foreign;
  const int64_t failures = memory::failed_allocations();
  try {
    if (may_play()) {
      random = RngSnapshot::capture(devices_);
      SettledOps ops(pending_->tape, pending_->rows.size());
      const auto settled = [&ops](uint32_t op, std::vector<c10::IValue>& stack,
                                  const std::vector<int64_t>* order) {
        return ops.settle(op, stack, order);
      };
      mixing = tape::find_mixing(pending_->tape, load(pending_->rows), pending_->exchanges,
                                 pending_->compared, settled);
    }
  } catch (...) {
    // The tape does not fit other values, or there is no room for it. Nothing else is this
    // experiment's: the user may have asked for the end in a function of `across_batch`.
    const std::exception_ptr error = std::current_exception();
    const bool no_room = memory::failed_allocations() != failures || !devices_.front().is_cpu();
    const bool own = is_out_of_memory(error) ? no_room : coupled::may_be_of_rows(error);
    if (!own) foreign = error;
    if (!own) keep_foreign_exception(error);
  }
  if (random) random->restore();
  if (foreign) std::rethrow_exception(foreign);
  return mixing;
}

void MixingExperiment::run(const std::function<Batch(Rows)>& load, bool last, bool sure) {
  if (!pending_) {
    if (last && unsure_of_two_ && !found_) *examined_ = true;
    return;
  }
  *examined_ = true;
  unsure_of_two_ = unsure();
  const std::optional<tape::Mixing> mixing = find_mixing(load);
  const Pending played = *std::exchange(pending_, std::nullopt);
  const bool found = mixing || played.counting;
  *examined_ = !found && (last || !unsure_of_two_);
  if (!found) return;
  if (!sure) return;
  found_ = true;
  const std::string end = "so micro-batches of " + std::to_string(played.rows.size()) +
                          " cannot give the gradient of all " + std::to_string(batch_size_) + "; ";
  const std::string ways =
      "make the budget large enough for one micro-batch, or accept another gradient with "
      "batch_coupling=\"per_micro_batch\"";
  if (!mixing) {
    throw CouplingError(*played.counting,
                        *played.counting +
                            " is given a number that counts the samples of a batch, " + end +
                            "scale by it in the loss, " + ways);
  }
  throw CouplingError(mixing->op,
                      mixing->op + " combines samples: outputs" +
                          played.tape.result.structure()->leaf_name(mixing->output) +
                          " of one sample depend on others in the batch, " + end +
                          (played.time_first.empty() ? "" : played.time_first + "; else ") +
                          "compute what needs all samples by across_batch, " + ways);
}

}  // namespace infinitybatch
