#include "autograd/engine.hpp"
#include "core/collectives.hpp"
#include "core/in_step.hpp"
#include "core/kept_batch.hpp"
#include "core/out_of_memory.hpp"
#include "core/rng.hpp"
#include "execute/buffer_values.hpp"
#include "execute/findings.hpp"
#include "step/admission.hpp"
#include "step/batch_kind.hpp"
#include "step/options.hpp"
#include "step/sorted_batch.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/memory/limit.hpp>
#include <infinitybatch/train/evaluation.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace infinitybatch {

namespace {

at::Device device_of(const Model& model) {
  for (const NamedParameter& parameter : model.parameters()) return parameter.tensor.device();
  return at::kCPU;
}

double number(const at::Tensor& tensor) {
  return tensor.item<double>();
}

/// A loss of outputs that have been padded back, which may take nothing from that padding: its own
/// gradient there tells, as in a step.
/// \param rows  whose outputs they are; without, of all
double number_beside_padding(const std::function<at::Tensor(const Batch&)>& loss,
                             const Batch& outputs, const Trimming& trimming,
                             std::optional<Rows> rows) {
  std::vector<Leaf> leaves = outputs.leaves();
  std::vector<size_t> padded;
  torch::autograd::edge_list edges;
  for (size_t i = 0; i < leaves.size(); ++i) {
    at::Tensor& tensor = leaves[i].tensor;
    const bool differentiable =
        tensor.defined() && (tensor.is_floating_point() || tensor.is_complex());
    if (!trimming.pads(i) || !differentiable) continue;
    tensor = tensor.detach().set_requires_grad(true);
    padded.push_back(i);
    edges.push_back(torch::autograd::impl::gradient_edge(tensor));
  }
  if (padded.empty()) return number(loss(outputs));
  const at::AutoGradMode recording(/*enabled=*/true);
  const at::Tensor value = loss(Batch(leaves, outputs.structure()));
  if (!value.requires_grad()) return number(value);
  const std::vector<at::Tensor> gradients = autograd::gradients_at(value, edges);
  for (size_t i = 0; i < padded.size(); ++i) {
    trimming.check_gradient(padded[i], leaves[padded[i]].batch_dim, gradients[i], rows);
  }
  return number(value.detach());
}

}  // namespace

class Evaluation::State {
 public:
  State(Model model, Loss loss, Options options)
      : model_(std::move(model)),
        loss_(std::move(loss)),
        options_(std::move(options)),
        device_(device_of(model_)),
        size_(options_.micro_batch_size.value_or(std::numeric_limits<int64_t>::max())),
        tokens_(options_.micro_batch_tokens),
        random_(RngSnapshot::capture({device_})) {
    if (size_ < 1) {
      throw InvalidArgument("micro_batch_size is " + std::to_string(size_) + "; it is 1 or more");
    }
    check_trim(options_);
    if (options_.memory_budget) budget_ = options_.memory_budget->resolve(device_);
    buffers_.emplace(model_.buffers());
  }

  ~State() {
    buffers_->restore();
    random_.restore();
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  void add(const BatchSource& inputs, const BatchSource& given) {
    const BatchSource targets = targets_for(loss_, given, inputs.size);
    if (std::string why = why_no_rows(targets); !why.empty()) throw BatchError(std::move(why));
    if (inputs.size != targets.size) {
      throw BatchError("inputs have " + std::to_string(inputs.size) + " samples and targets " +
                       std::to_string(targets.size));
    }
    const at::NoGradGuard no_grad;
    std::optional<memory::Limit> limit;
    if (budget_) limit.emplace(*budget_, device_);
    if (options_.trim.empty()) {
      add_slices({inputs, targets, loss_, options_.on_micro_batch}, limit);
    } else {
      add_sorted(inputs, targets, limit);
    }
    samples_ += inputs.size;
  }

  double loss() const {
    if (samples_ == 0) return std::numeric_limits<double>::quiet_NaN();
    const auto* separable = std::get_if<SeparableLoss>(&loss_);
    const double value = undivided_ ? sum_ : sum_ / denominator_;
    if (separable == nullptr || !separable->has_penalty()) return value;
    const at::NoGradGuard no_grad;
    return value + number(separable->penalty());
  }

  int64_t samples() const { return samples_; }
  int64_t size() const { return size_; }
  const Loss& loss_function() const noexcept { return loss_; }
  const std::optional<BatchDim>& batch_dim() const noexcept { return options_.batch_dim; }

 private:
  /// One batch, as it is given or with its rows sorted by length.
  struct Rowwise {
    const BatchSource& inputs;
    const BatchSource& targets;
    const Loss& loss;
    std::function<void(const infinitybatch::MicroBatch&)> shown;
    Trimming* trimming = nullptr;
  };

  void add_sorted(const BatchSource& inputs, const BatchSource& targets,
                  const std::optional<memory::Limit>& limit) {
    Options unplanned = options_;  // slices are cut here
    unplanned.micro_batch_size.reset();
    unplanned.micro_batch_tokens.reset();
    const SortedStep sorted(unplanned, loss_, inputs, targets, /*reads_parts=*/true, sequences_);
    sorted.trimming()->planned = false;
    try {
      learn(sorted);
    } catch (...) {
      make_smaller(/*rows=*/1, limit);
    }
    add_slices({sorted.inputs(), sorted.targets(), sorted.loss(),
                sorted.callback(options_.on_micro_batch), sorted.trimming().get()},
               limit);
  }

  /// A few rows, trimmed, beside themselves in full: once for each kind of batch.
  void learn(const SortedStep& sorted) {
    Setup setup;
    Problem& problem = setup.problem;
    problem.model = &model_;
    problem.loss = sorted.loss();
    problem.inputs = &sorted.inputs();
    problem.targets = &sorted.targets();
    problem.exact_coupling = false;  // slices are looked at by nobody
    problem.trimming = sorted.trimming();
    problem.interrupt = options_.interrupt;
    admit_model(problem);
    const BatchKind kind = batch_kind(problem, sorted.inputs(), sorted.targets());
    setup.resources.findings = &findings_[kind.program];
    learn_trimming(setup);
  }

  void add_slices(const Rowwise& given, const std::optional<memory::Limit>& limit) {
    const auto* coupled = std::get_if<CoupledLoss>(&given.loss);
    const int64_t size = given.inputs.size;
    std::vector<Batch> kept;
    std::vector<int64_t> counts;
    for (int64_t begin = 0; begin < size;) {
      if (options_.interrupt) options_.interrupt();
      const Rows rows{begin, begin + next_size(given, begin)};
      std::optional<infinitybatch::MicroBatch> slice;
      try {
        slice = forward(given, rows);
      } catch (...) {
        make_smaller(rows.size(), limit);
        if (given.trimming != nullptr) tokens_ = rows.size() / 2 * positions(*given.trimming, rows);
        continue;
      }
      if (given.shown) given.shown(*slice);
      if (coupled != nullptr) {
        kept.push_back(std::move(slice->outputs));
        counts.push_back(rows.size());
      }
      begin = rows.end;
    }
    if (coupled == nullptr) return;
    const Batch all = to_device(given.targets.rows(0, size), device_);
    const Batch outputs = concatenate(std::move(kept), counts, "outputs");
    if (given.trimming != nullptr) given.trimming->sizes = counts;
    const auto value = [&](const Batch& of) { return coupled->value(of, all); };
    sum_ += value_of(given, value, outputs, std::nullopt) * static_cast<double>(size);
    denominator_ += static_cast<double>(size);
  }

  /// Rows of the next slice.
  int64_t next_size(const Rowwise& given, int64_t begin) const {
    if (given.trimming == nullptr) return std::min(size_, given.inputs.size - begin);
    return packed_from(begin, given.trimming->sequences, tokens_, size_);
  }

  /// That the longest of these rows has in all sequences.
  static int64_t positions(const Trimming& trimming, Rows rows) {
    int64_t total = 0;
    for (const auto& sequence : trimming.sequences) total += trimming.length(sequence, rows);
    return total;
  }

  static double value_of(const Rowwise& given, const std::function<at::Tensor(const Batch&)>& loss,
                         const Batch& outputs, std::optional<Rows> rows) {
    if (given.trimming == nullptr) return number(loss(outputs));
    return number_beside_padding(loss, outputs, *given.trimming, rows);
  }

  static std::optional<std::string> why_no_collectives(Rows rows, int64_t size) {
    if (rows.size() == size) return std::nullopt;
    return "on " + std::to_string(rows.size()) + " of " + std::to_string(size) +
           " samples, and other ranks need not split theirs alike; give micro_batch_size=" +
           std::to_string(size);
  }

  infinitybatch::MicroBatch forward(const Rowwise& given, Rows rows) {
    const InStep running;
    infinitybatch::MicroBatch slice{rows.begin, rows.end, {}, {}};
    Trimming* const trimming = given.trimming;
    Batch targets = given.targets.rows(rows.begin, rows.end);
    Batch inputs = given.inputs.rows(rows.begin, rows.end);
    if (trimming != nullptr) {
      targets = trimming->targets(targets, rows);
      inputs = trimming->inputs(inputs, rows);
      trimming->at_work = rows;
    }
    slice.targets = to_device(targets, device_);
    inputs = to_device(inputs, device_);
    without_collectives("forward", why_no_collectives(rows, given.inputs.size),
                        [&] { slice.outputs = model_.forward(inputs); });
    if (trimming != nullptr) slice.outputs = trimming->padded(slice.outputs, inputs);
    inputs = Batch();
    const auto* separable = std::get_if<SeparableLoss>(&given.loss);
    if (separable == nullptr) return slice;
    const auto share = [&](const Batch& of) { return separable->sum(of, slice.targets); };
    const double sum = value_of(given, share, slice.outputs, rows);
    const DenominatorPart part = separable->denominator(slice.targets, rows.size());
    memory::Limit::check();
    sum_ += sum;
    if (std::holds_alternative<Undivided>(part)) {
      undivided_ = true;
    } else if (const double* known = std::get_if<double>(&part)) {
      denominator_ += *known;
    } else {
      denominator_ += number(std::get<at::Tensor>(part));
    }
    return slice;
  }

  /// In a handler: throws on what is no lack of memory, and where nothing smaller is left.
  void make_smaller(int64_t rows, const std::optional<memory::Limit>& limit) {
    if (!is_out_of_memory(std::current_exception())) throw;
    if (rows == 1) {
      if (!limit || !limit->allocation_failed()) throw;
      throw BudgetExceeded(limit->refused(), *budget_, std::nullopt,
                           "the evaluation of a single sample");
    }
    if (options_.trim.empty()) size_ = rows / 2;
  }

  Model model_;
  Loss loss_;
  Options options_;
  at::Device device_;
  int64_t size_;
  std::optional<int64_t> tokens_;  // with `trim`: positions of a slice
  RngSnapshot random_;
  std::optional<int64_t> budget_;
  std::optional<BufferValues> buffers_;
  std::map<std::string, Findings> findings_;  // with `trim`, by kind of batch
  SequenceInputs sequences_;                  // with `trim`
  double sum_ = 0;
  double denominator_ = 0;
  bool undivided_ = false;
  int64_t samples_ = 0;
};

Evaluation::Evaluation(Model model, Loss loss, Options options)
    : state_(std::make_unique<State>(std::move(model), std::move(loss), std::move(options))) {}
Evaluation::~Evaluation() = default;

void Evaluation::add(const BatchSource& inputs, const BatchSource& targets) {
  refuse_batch_dim(state_->batch_dim());
  state_->add(inputs, targets);
}
void Evaluation::add(const Batch& inputs, const Batch& targets) {
  const Sources sources = sources_of(inputs, targets, state_->batch_dim(), state_->loss_function());
  state_->add(sources.inputs, sources.targets);
}

double Evaluation::loss() const {
  return state_->loss();
}
int64_t Evaluation::samples() const {
  return state_->samples();
}
int64_t Evaluation::micro_batch_size() const {
  return state_->size();
}

}  // namespace infinitybatch
