#include "autograd/engine.hpp"
#include "core/collectives.hpp"
#include "core/tensor_parts.hpp"
#include "core/torch_compat.hpp"
#include "coupled/across_batch_op.hpp"
#include "coupled/coupling_watch.hpp"
#include "coupled/part_of_batch.hpp"
#include "coupled/provisional.hpp"
#include "coupled/provisional_run.hpp"
#include "tape/recorder.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>
#include <ATen/SequenceNumber.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/alias.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <memory>
#include <optional>
#include <utility>

namespace infinitybatch {
namespace {

struct Known {
  AcrossBatchFunction function;
  std::optional<coupled::PartOfBatch::Facts> part;  // that the recording was made of
  // It ran on all samples while forward was recorded, which is the run that counts.
  std::shared_ptr<bool> ran = std::make_shared<bool>(false);
};

/// By number; see AcrossBatchFunctions.
thread_local std::map<int64_t, Known> functions;
thread_local int64_t next_function = 0;

at::Tensor run(const AcrossBatchFunction& function, const std::vector<at::Tensor>& inputs) {
  at::Tensor result = function(inputs);
  const int64_t rows = inputs.front().size(0);
  if (!result.defined() || result.dim() == 0 || result.size(0) != rows) {
    throw InvalidArgument(
        "the function of across_batch returned " +
        (result.defined() ? "shape " + c10::str(result.sizes()) : std::string("nothing")) +
        " for " + std::to_string(rows) +
        " rows; it must return one row for each, as in value.expand(len(x), …)");
  }
  return result;
}

/// In memory that is nobody else's: a step writes the result of all samples over it, and what the
/// function returns may be a view of its input or of a tensor that it keeps.
at::Tensor in_own_memory(at::Tensor result) {
  const bool strided = is_plain(result);
  const bool own = strided && result.is_non_overlapping_and_dense() && result.use_count() == 1 &&
                   result.storage().use_count() == 1;
  return own ? result : result.clone(at::MemoryFormat::Contiguous);
}

at::Tensor kernel(at::TensorList inputs, int64_t number) {
  const Known known = functions.at(number);
  if (!known.part) {
    *known.ran = true;
    return in_own_memory(run(known.function, inputs.vec()));
  }
  const auto here = [&](const std::vector<at::Tensor>& rows) { return run(known.function, rows); };
  return in_own_memory(coupled::run_provisionally(here, inputs.vec(), *known.part));
}

TORCH_LIBRARY_FRAGMENT(infinitybatch, library) {
  library.def("across_batch(Tensor[] inputs, int function) -> Tensor", kernel);
}

}  // namespace

at::Tensor across_batch(const AcrossBatchFunction& function,
                        const std::vector<at::Tensor>& inputs) {
  if (inputs.empty()) throw InvalidArgument("across_batch needs a tensor; none was given");
  for (const at::Tensor& input : inputs) {
    if (!input.defined() || input.dim() == 0) {
      throw InvalidArgument(
          "across_batch needs tensors whose first dimension is the batch; one has "
          "no dimension");
    }
  }
  if (!coupled::CouplingWatch::at_work()) return run(function, inputs);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("infinitybatch::across_batch", "")
                             .typed<at::Tensor(at::TensorList, int64_t)>();
  const int64_t number = next_function++;
  functions[number] = Known{function, coupled::PartOfBatch::at_work()};
  return op.call(inputs, number);
}

namespace coupled {

AcrossBatchFunctions::AcrossBatchFunctions() : first_(next_function) {}

AcrossBatchFunctions::~AcrossBatchFunctions() {
  forget();
}

void AcrossBatchFunctions::close() {
  forget();
  open_ = false;
}

void AcrossBatchFunctions::forget() {
  if (!open_) return;
  functions.erase(functions.lower_bound(first_), functions.end());
  next_function = first_;
}

AcrossBatch::AcrossBatch(int64_t number)
    : function_(functions.at(number).function),
      part_(functions.at(number).part),
      ran_(functions.at(number).ran) {}

void AcrossBatch::collect(Rows rows, const Arguments& arguments) {
  Part& part = parts_[rows.begin];
  samples_ += rows.size();
  for (const at::Tensor& input : arguments[0].toTensorVector()) {
    part.sizes.push_back(input.size(0));
    part.inputs.push_back(input.detach());
    part.wants_gradient.push_back(input.requires_grad());
  }
  for (const int64_t size : part.sizes) {
    if (size % rows.size() == 0) continue;
    throw CouplingError("infinitybatch::across_batch",
                        "infinitybatch::across_batch was given a tensor with " +
                            std::to_string(size) + " rows for " + std::to_string(rows.size()) +
                            " samples: its first dimension does not hold the samples");
  }
  const Part& first = parts_.begin()->second;
  if (first.inputs.size() != part.inputs.size()) {
    throw CouplingError("infinitybatch::across_batch",
                        "infinitybatch::across_batch gets " + std::to_string(first.inputs.size()) +
                            " tensors for some samples and " + std::to_string(part.inputs.size()) +
                            " for others");
  }
}

void AcrossBatch::combine(SettledBuffers& /*buffers*/) {
  const size_t count = parts_.begin()->second.inputs.size();
  for (size_t i = 0; i < count; ++i) {
    std::vector<at::Tensor> rows;
    int64_t begin = 0;
    bool wants_gradient = false;
    for (auto& [key, part] : parts_) {
      part.begins.push_back(begin);
      begin += part.sizes[i];
      rows.push_back(std::move(part.inputs[i]));
      wants_gradient = wants_gradient || part.wants_gradient[i];
    }
    const at::NoGradGuard no_grad;
    inputs_.push_back(at::cat(rows));
    inputs_.back().set_requires_grad(wants_gradient);
  }
  for (auto& [key, part] : parts_) part.inputs.clear();
  const uint64_t begin = at::sequence_number::peek();
  std::vector<at::Tensor> given;
  for (const at::Tensor& input : inputs_) {
    given.push_back(input.detach());
    // No leaf, which it could not change in place.
    const bool history = input.requires_grad() && c10::GradMode::is_enabled();
    if (history) compat::begin_history(given.back(), at::alias(input));
  }
  const auto all = [&](const std::vector<at::Tensor>& rows) { return run(function_, rows); };
  const bool rehearsal = part_ && samples_ < part_->total;
  if (rehearsal) part_->rows = samples_;
  std::optional<ProvisionalRun> once_more;
  if (std::exchange(*ran_, false)) once_more.emplace();
  without_collectives(
      "the function of across_batch",
      "while this rank's batch is in micro-batches; run it in the loss, or give a micro_batch_size "
      "as large as the batch",
      [&] { result_ = rehearsal ? run_provisionally(all, given, *part_) : all(given); });
  once_more.reset();
  autograd::walk_graph({result_}, [&](torch::autograd::Node& node) {
    const bool leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(&node) != nullptr;
    if (leaf || node.sequence_nr() >= begin) return;
    throw CouplingError("infinitybatch::across_batch",
                        "the function of across_batch uses a tensor of the forward around it (" +
                            node.name() +
                            "), which is the first micro-batch's; give it to across_batch as an "
                            "input");
  });
}

at::Tensor AcrossBatch::apply(Rows rows, const Arguments& /*arguments*/,
                              std::vector<at::Tensor>& leaves) {
  const Part& part = parts_.at(rows.begin);
  const at::Tensor given = result_.detach().narrow(0, part.begins.front(), part.sizes.front());
  if (!result_.requires_grad() || !c10::GradMode::is_enabled()) return given.clone();
  leaves = {given.detach().requires_grad_()};
  // Forward may change it in place, which a leaf does not allow.
  return leaves.front().clone();
}

void AcrossBatch::begin_backward(bool keep) {
  keep_ = keep;
  gradients_.clear();
  for (at::Tensor& input : inputs_) input.mutable_grad().reset();
  for (auto& [key, part] : parts_) part.gradient.reset();
}

void AcrossBatch::collect_gradient(Rows rows, const std::vector<at::Tensor>& leaves) {
  if (!leaves.empty()) parts_.at(rows.begin).gradient = leaves.front().grad();
}

void AcrossBatch::combine_gradients(autograd::GradientSinks& sinks) {
  std::vector<at::Tensor> rows;
  bool any = false;
  for (auto& [key, part] : parts_) any = any || part.gradient.defined();
  if (!any) return;
  for (auto& [key, part] : parts_) {
    if (!part.gradient.defined()) {  // these rows of the result were not used
      part.gradient =
          at::zeros_like(result_.detach().narrow(0, part.begins.front(), part.sizes.front()));
    }
    rows.push_back(std::move(part.gradient));
  }
  const at::Tensor gradient = at::cat(rows);
  rows.clear();
  sinks.redirect_other_leaves({result_}, inputs_);
  const at::Tensor root = keep_ ? result_ : std::exchange(result_, at::Tensor());
  autograd::run_backward({root}, {gradient}, keep_);
  for (const at::Tensor& input : inputs_) gradients_.push_back(input.grad());
  if (!keep_) inputs_.clear();
}

void AcrossBatch::correct(Rows rows, size_t which, const at::Tensor& input,
                          at::Tensor& gradient) const {
  if (!gradients_[which].defined()) return;
  const at::NoGradGuard no_grad;
  const Part& part = parts_.at(rows.begin);
  const at::Tensor here = gradients_[which].narrow(0, part.begins[which], part.sizes[which]);
  if (gradient.defined()) {
    gradient.add_(here);
  } else {
    gradient = here.clone().to(input.scalar_type());
  }
}

}  // namespace coupled
}  // namespace infinitybatch
