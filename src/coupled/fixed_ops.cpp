#include "coupled/fixed_ops.hpp"

#include "core/rng.hpp"
#include "core/unwatched.hpp"

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <string_view>

namespace infinitybatch::coupled {
namespace {

constexpr std::array<std::string_view, 4> kNorms{"aten::batch_norm", "aten::native_batch_norm",
                                                 "aten::_native_batch_norm_legit",
                                                 "aten::cudnn_batch_norm"};
constexpr std::string_view kAcross = "infinitybatch::across_batch";

double number(c10::ArrayRef<const c10::IValue> inputs, size_t index, double otherwise) {
  if (index >= inputs.size()) return otherwise;
  if (inputs[index].isDouble()) return inputs[index].toDouble();
  return inputs[index].isInt() ? static_cast<double>(inputs[index].toInt()) : otherwise;
}

/// What stands for every number of a draw; nothing where the op is no draw that fills a tensor.
/// All other draws of torch's kernels end in one of these, or move the generator unseen.
std::optional<double> fixed_draw(std::string_view name, c10::ArrayRef<const c10::IValue> inputs) {
  if (name == "aten::bernoulli_") return 1;
  if (name == "aten::uniform_") {
    const double from = number(inputs, 1, 0);
    return from + 0.37 * (number(inputs, 2, 1) - from);
  }
  if (name == "aten::normal_") return number(inputs, 1, 0) + 0.5 * number(inputs, 2, 1);
  if (name == "aten::random_") return inputs.size() == 4 ? number(inputs, 1, 0) : 0;
  if (name == "aten::exponential_" || name == "aten::geometric_") return 1;
  if (name == "aten::cauchy_") return number(inputs, 1, 0);
  if (name == "aten::log_normal_") return 1.2;
  return std::nullopt;
}

/// An op whose kernels may draw unseen, and draw nothing where an argument has another value.
struct DrawsInside {
  std::string_view op, argument;
  double still;
};
constexpr std::array kDrawsInside{
    DrawsInside{"aten::native_dropout", "train", 0},
    DrawsInside{"aten::scaled_dot_product_attention", "dropout_p", 0},
    DrawsInside{"aten::rrelu", "training", 0},
    DrawsInside{"aten::lstm", "dropout", 0},
    DrawsInside{"aten::gru", "dropout", 0},
    DrawsInside{"aten::rnn_tanh", "dropout", 0},
    DrawsInside{"aten::rnn_relu", "dropout", 0},
};

/// The arguments of a call of it that draws nothing.
std::vector<c10::IValue> still_arguments(const DrawsInside& op, const tape::SeenOp& seen) {
  const auto& schema = seen.facts()->handle.schema();
  const size_t count = schema.arguments().size();
  const auto given = seen.inputs();
  std::vector<c10::IValue> arguments(given.end() - static_cast<std::ptrdiff_t>(count), given.end());
  const auto place = schema.argumentIndexWithName(std::string(op.argument));
  if (!place) return {};
  c10::IValue& value = arguments[static_cast<size_t>(*place)];
  value = value.isDouble() ? c10::IValue(op.still) : c10::IValue(op.still != 0);
  return arguments;
}

/// cuDNN draws for recurrent layers by a state of its own, which no generator tells of.
bool draws_hidden(const DrawsInside& op, const tape::SeenOp& seen) {
  if (op.argument != "dropout") return false;
  const auto inputs = seen.inputs();
  const auto& schema = seen.facts()->handle.schema();
  const auto train = schema.argumentIndexWithName("train");
  const size_t hidden = inputs.size() - schema.arguments().size();
  if (train && !inputs[hidden + static_cast<size_t>(*train)].toBool()) return false;
  bool drops = false, elsewhere = false;
  for (const c10::IValue& input : inputs) {
    drops = drops || (input.isDouble() && input.toDouble() > 0);
    elsewhere = elsewhere || (input.isTensor() && !input.toTensor().device().is_cpu());
  }
  return drops && elsewhere;
}

/// Seeds for a kernel that draws by itself (a compiled region), for each place among the samples
/// another number.
bool draws_seeds(std::string_view name, c10::ArrayRef<const c10::IValue> inputs) {
  return name == "aten::random_" && inputs.size() == 4 && inputs[1].isInt() &&
         inputs[1].toInt() == std::numeric_limits<int64_t>::min();
}

bool in_training(c10::ArrayRef<const c10::IValue> inputs) {
  const auto found = std::find_if(inputs.begin(), inputs.end(),
                                  [](const c10::IValue& input) { return input.isBool(); });
  return found != inputs.end() && found->toBool();
}

at::Tensor tensor_of(c10::ArrayRef<const c10::IValue> inputs, size_t index) {
  return index < inputs.size() && inputs[index].isTensor() ? inputs[index].toTensor()
                                                           : at::Tensor();
}

/// One number for each channel, to be broadcast over `like`.
at::Tensor by_channel(const at::Tensor& values, const at::Tensor& like) {
  std::vector<int64_t> sizes(static_cast<size_t>(like.dim()), 1);
  sizes[1] = values.numel();
  return values.detach().view(sizes);
}

/// One number for each row of what a function of all samples is given, so that samples that are
/// combined in front of it are seen behind it. Read before it runs: it may write its inputs.
std::vector<at::Tensor> means_of_rows(const std::vector<at::Tensor>& given) {
  std::vector<at::Tensor> means;
  for (const at::Tensor& tensor : given) {
    if (!tensor.is_floating_point() || tensor.dim() == 0 || tensor.numel() == 0) continue;
    if (tensor.layout() != at::kStrided) continue;
    means.push_back(tensor.detach().reshape({tensor.size(0), -1}).mean(1));
  }
  return means;
}

bool replaceable(const at::Tensor& result) {
  return !result.unsafeGetTensorImpl()->is_python_dispatch() && !result.is_inference();
}

void add_to_rows(const at::Tensor& output, const std::vector<at::Tensor>& means) {
  if (output.dim() == 0) return;
  std::vector<int64_t> each(static_cast<size_t>(output.dim()), 1);
  each[0] = output.size(0);
  for (const at::Tensor& mean : means) {
    if (mean.size(0) == each[0]) output.add_(mean.view(each));
  }
}

}  // namespace

struct FixedOps::Replaced : tape::OpContext {
  std::optional<double> draw;
  at::Tensor input, weight, bias;  // of a norm
  std::vector<at::Tensor> means;   // of rows given to a function of all samples
  std::vector<c10::IValue> still;  // arguments with which an op draws nothing
  bool hidden = false;             // it may have drawn though no generator has moved
  bool inside = false;
  bool across = false;
};

FixedOps::FixedOps(const std::vector<at::Device>& devices, int64_t rows, const CouplingWatch& watch,
                   bool backward)
    : rows_(rows), watch_(watch), backward_(backward) {
  const auto know = [this](const at::Generator& generator) {
    generators_.emplace_back(generator, GeneratorState(generator));
  };
  know(at::globalContext().defaultGenerator(at::kCPU));
  for (const at::Device& device : devices) {
    if (!device.is_cpu()) know(at::globalContext().defaultGenerator(device));
  }
  listening_.emplace(*this, tape::Hears{.results = true});
}

FixedOps::~FixedOps() {
  listening_.reset();
  put_back();  // those that ops were given are nobody else's to put back
}

bool FixedOps::strayed() {
  errors_.rethrow();
  return strayed_ || moved();
}

bool FixedOps::moved() const {
  return std::any_of(generators_.begin(), generators_.end(),
                     [](const auto& each) { return !(GeneratorState(each.first) == each.second); });
}

std::map<std::string, std::string> FixedOps::foreign() const {
  return tell_foreign_sources();
}

std::unique_ptr<tape::OpContext> FixedOps::begin(const tape::SeenOp& op) noexcept {
  std::unique_ptr<tape::OpContext> context;
  errors_.guard([&] { context = meet(op); });
  return context;
}

void FixedOps::end(const tape::SeenOp& op, tape::OpContext* context) noexcept {
  if (context == nullptr) return;
  auto& replaced = static_cast<Replaced&>(*context);
  if (replaced.inside) --inside_;
  errors_.guard([&] { replace(op, replaced); });
}

std::unique_ptr<tape::OpContext> FixedOps::meet(const tape::SeenOp& op) {
  if (inside_ > 0) return nullptr;
  const std::string_view name = op.name();
  const auto inputs = op.inputs();
  auto replaced = std::make_unique<Replaced>();
  replaced->draw = fixed_draw(name, inputs);
  strayed_ = strayed_ || draws_seeds(name, inputs);
  const bool norm = std::find(kNorms.begin(), kNorms.end(), name) != kNorms.end();
  replaced->across = name == kAcross;
  // Computed by batch_norm, over each sample.
  replaced->inside = norm || replaced->across || name == "aten::instance_norm";
  const auto still = std::find_if(kDrawsInside.begin(), kDrawsInside.end(),
                                  [&](const DrawsInside& each) { return each.op == name; });
  // The graph of an op that kept its draws would be another than that of what replaced its result;
  // dropout keeps nothing but the mask, which is replaced too.
  const bool known = still != kDrawsInside.end() && op.facts() != nullptr;
  replaced->hidden = known && draws_hidden(*still, op);
  if (known && (!backward_ || still == kDrawsInside.begin())) {
    replaced->still = still_arguments(*still, op);
  } else if (replaced->hidden) {
    strayed_ = true;
  }
  replaced->inside = replaced->inside || replaced->hidden;
  // By a draw that nobody fixes: behind this one generators are put back.
  if (replaced->draw || !replaced->still.empty()) strayed_ = strayed_ || moved();
  if (!replaced->draw && !replaced->inside && replaced->still.empty()) return nullptr;
  stood_in_ = stood_in_ || replaced->across;
  if (norm && in_training(inputs) && !watch_.is_parameter(inputs[0])) {
    stood_in_ = true;
    replaced->input = tensor_of(inputs, 0);
    replaced->weight = tensor_of(inputs, 1);
    replaced->bias = tensor_of(inputs, 2);
  }
  if (replaced->across && !inputs.empty() && inputs[0].isTensorList()) {
    const at::RecordFunctionGuard unrecorded(/*is_enabled=*/false);
    const Unwatched unseen;
    replaced->means = means_of_rows(inputs[0].toTensorVector());
  }
  for (const c10::IValue& input : inputs) {
    if (!replaced->draw || !input.isGenerator()) continue;
    const at::Generator generator = input.toGenerator();
    const bool known = std::any_of(generators_.begin(), generators_.end(),
                                   [&](const auto& each) { return each.first == generator; });
    if (!known) generators_.emplace_back(generator, GeneratorState(generator));
  }
  if (replaced->inside) ++inside_;  // nothing can fail from here on, so that its end comes
  return replaced;
}

/// Kernels of accelerators draw in one with what they compute: what they gave becomes what they
/// give without drawing.
void FixedOps::run_still(const tape::SeenOp& op, Replaced& replaced) {
  if (strayed_ || !(replaced.hidden || moved())) return;
  std::vector<c10::IValue> stack = std::move(replaced.still);
  const at::RecordFunctionGuard unrecorded(/*is_enabled=*/false);
  const Unwatched unseen;
  op.facts()->handle.callBoxed(stack);
  const auto outputs = op.outputs();
  for (size_t i = 0; i < outputs.size() && i < stack.size(); ++i) {
    if (!outputs[i].isTensor() || !outputs[i].toTensor().defined()) continue;
    if (!replaceable(outputs[i].toTensor())) return;  // and so this has strayed
    outputs[i].toTensor().variable_data().copy_(stack[i].toTensor());
  }
  put_back();
}

void FixedOps::put_back() const {
  for (const auto& [generator, state] : generators_) state.put_back(generator);
}

void FixedOps::replace(const tape::SeenOp& op, Replaced& replaced) {
  if (errors_.any()) return;
  if (!replaced.still.empty()) return run_still(op, replaced);
  if (!replaced.draw && !replaced.across && !replaced.input.defined()) return;
  const at::RecordFunctionGuard unrecorded(/*is_enabled=*/false);
  const Unwatched unseen;
  const auto outputs = op.outputs();
  if (outputs.empty() || !outputs[0].isTensor() || !outputs[0].toTensor().defined()) {
    strayed_ = true;
    return;
  }
  const at::Tensor& given = outputs[0].toTensor();
  if (!replaceable(given)) {
    strayed_ = true;
    return;
  }
  // The version stays: the op itself has just written it.
  const at::Tensor output = given.variable_data();
  if (replaced.draw) {
    output.fill_(*replaced.draw);
    put_back();
  } else if (replaced.across) {
    const bool numbers = output.is_floating_point() || output.is_complex();
    output.fill_(numbers && output.dim() > 0
                     ? static_cast<double>(output.size(0)) / static_cast<double>(rows_)
                     : 0);
    if (numbers) add_to_rows(output, replaced.means);
  } else {
    const at::Tensor& input = replaced.input;
    output.copy_(input.detach());
    if (replaced.weight.defined()) output.mul_(by_channel(replaced.weight, input));
    if (replaced.bias.defined()) output.add_(by_channel(replaced.bias, input));
    output.add_(static_cast<double>(input.size(0)) / static_cast<double>(rows_));
  }
}

}  // namespace infinitybatch::coupled
