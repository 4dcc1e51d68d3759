#include "core/out_of_memory.hpp"
#include "core/rng.hpp"
#include "step/admission.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/memory/limit.hpp>
#include <infinitybatch/train/evaluation.hpp>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace infinitybatch {

/// A buffer's tensor and values, to be put back where forward has changed either.
class EvaluationBuffer {
 public:
  explicit EvaluationBuffer(BufferSlot slot)
      : slot_(std::move(slot)), tensor_(slot_.get()), version_(0) {
    if (!tensor_.defined()) return;
    values_ = tensor_.detach().clone();
    version_ = tensor_.is_inference() ? 0 : tensor_._version();
  }

  void put_back() const {
    const at::Tensor now = slot_.get();
    if (!tensor_.defined()) {
      if (now.defined()) slot_.set(tensor_);
      return;
    }
    const bool same = now.defined() && now.is_same(tensor_);
    if (same && !tensor_.is_inference() && tensor_._version() == version_) return;
    at::Tensor(tensor_).copy_(values_);
    if (!same) slot_.set(tensor_);
  }

 private:
  BufferSlot slot_;
  at::Tensor tensor_;
  at::Tensor values_;
  uint32_t version_;
};

namespace {

at::Device device_of(const Model& model) {
  for (const NamedParameter& parameter : model.parameters()) return parameter.tensor.device();
  return at::kCPU;
}

double number(const at::Tensor& tensor) {
  return tensor.item<double>();
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
        random_(RngSnapshot::capture({device_})) {
    if (size_ < 1) {
      throw InvalidArgument("micro_batch_size is " + std::to_string(size_) + "; it is 1 or more");
    }
    if (options_.memory_budget) budget_ = options_.memory_budget->resolve(device_);
    const at::NoGradGuard no_grad;
    for (BufferSlot& slot : model_.buffers()) buffers_.emplace_back(std::move(slot));
  }

  ~State() {
    const at::NoGradGuard no_grad;
    for (const EvaluationBuffer& buffer : buffers_) buffer.put_back();
    random_.restore();
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  void add(const BatchSource& inputs, const BatchSource& targets) {
    if (inputs.size != targets.size) {
      throw BatchError("inputs have " + std::to_string(inputs.size) + " samples and targets " +
                       std::to_string(targets.size));
    }
    const at::NoGradGuard no_grad;
    std::optional<memory::Limit> limit;
    if (budget_) limit.emplace(*budget_, device_);
    const auto* coupled = std::get_if<CoupledLoss>(&loss_);
    std::vector<Batch> kept;
    std::vector<int64_t> counts;
    for (int64_t begin = 0; begin < inputs.size;) {
      if (options_.interrupt) options_.interrupt();
      const int64_t end = begin + std::min(size_, inputs.size - begin);
      std::optional<infinitybatch::MicroBatch> slice;
      try {
        slice = forward(inputs, targets, begin, end);
      } catch (...) {
        make_smaller(end - begin, limit);
        continue;
      }
      if (options_.on_micro_batch) options_.on_micro_batch(*slice);
      if (coupled != nullptr) {
        kept.push_back(std::move(slice->outputs));
        counts.push_back(end - begin);
      }
      begin = end;
    }
    samples_ += inputs.size;
    if (coupled == nullptr) return;
    const Batch all = to_device(targets.rows(0, targets.size), device_);
    const Batch outputs = concatenate(std::move(kept), counts, "outputs");
    sum_ += number(coupled->value(outputs, all)) * static_cast<double>(inputs.size);
    denominator_ += static_cast<double>(inputs.size);
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
  const std::optional<BatchDim>& batch_dim() const noexcept { return options_.batch_dim; }

 private:
  infinitybatch::MicroBatch forward(const BatchSource& inputs, const BatchSource& targets,
                                    int64_t begin, int64_t end) {
    infinitybatch::MicroBatch slice{begin, end, {}, {}};
    slice.targets = to_device(targets.rows(begin, end), device_);
    slice.outputs = model_.forward(to_device(inputs.rows(begin, end), device_));
    const auto* separable = std::get_if<SeparableLoss>(&loss_);
    if (separable == nullptr) return slice;
    const double sum = number(separable->sum(slice.outputs, slice.targets));
    const DenominatorPart part = separable->denominator(slice.targets, end - begin);
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
    size_ = rows / 2;
  }

  Model model_;
  Loss loss_;
  Options options_;
  at::Device device_;
  int64_t size_;
  RngSnapshot random_;
  std::optional<int64_t> budget_;
  std::vector<EvaluationBuffer> buffers_;
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
  const Sources sources = sources_of(inputs, targets, state_->batch_dim());
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
