#include "loss/arguments.hpp"

#include "core/squeezed.hpp"

#include <infinitybatch/core/errors.hpp>

#include <sstream>

namespace infinitybatch {

Reduction parse_reduction(std::string_view name) {
  if (name == "mean") return Reduction::mean;
  if (name == "sum") return Reduction::sum;
  if (name == "batchmean") return Reduction::batchmean;
  if (name == "none") {
    throw InvalidArgument(
        "reduction 'none' gives one loss per element, and backward needs one number; use 'mean' or "
        "'sum'");
  }
  throw InvalidArgument("'" + std::string(name) +
                        "' is no reduction; there are 'mean', 'sum' and 'batchmean'");
}

namespace losses {

std::string shape_of(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.sizes();
  return text.str();
}

std::vector<at::Tensor> raw_arguments(const std::string& name, const Batch& outputs,
                                      const Batch& targets, const Signature& signature) {
  std::vector<at::Tensor> tensors = outputs.tensors();
  const size_t from_outputs = tensors.size();
  for (at::Tensor& tensor : targets.tensors()) tensors.push_back(std::move(tensor));
  if (from_outputs == 0 || from_outputs > signature.most_of_outputs ||
      tensors.size() < signature.least || tensors.size() > signature.most) {
    throw InvalidArgument(name + " takes " + signature.text + ", but was given " +
                          std::to_string(from_outputs) + " tensor(s) of outputs and " +
                          std::to_string(tensors.size() - from_outputs) + " of targets");
  }
  return tensors;
}

std::vector<at::Tensor> arguments(const std::string& name, const Batch& outputs,
                                  const Batch& targets, const Signature& signature) {
  std::vector<at::Tensor> tensors = raw_arguments(name, outputs, targets, signature);
  for (at::Tensor& tensor : tensors) tensor = widened(tensor);
  return tensors;
}

at::Tensor widened(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  const at::ScalarType type = tensor.scalar_type();
  return type == at::kHalf || type == at::kBFloat16 ? tensor.to(at::kFloat) : tensor;
}

at::Tensor beside(const at::Tensor& weight, const at::Tensor& input) {
  return weight.defined() ? widened(weight.to(input.device())) : weight;
}

at::ScalarType accumulation_type(const at::Device& device) {
  return device.type() == at::kMPS ? at::kFloat : at::kDouble;  // which has no float64
}

const Leaf& target_leaf(const std::string& name, const Batch& targets, size_t position) {
  for (const Leaf& leaf : targets.leaves()) {
    if (!leaf.tensor.defined() || position-- > 0) continue;
    if (leaf.batch_dim == Leaf::kShared) {
      throw InvalidArgument(name + " was given targets of shape " + shape_of(leaf.tensor) +
                            " that every micro-batch sees whole; they need one entry per sample");
    }
    return leaf;
  }
  throw InvalidArgument(name + " needs targets, but was given " +
                        std::to_string(targets.tensors().size()) + " tensor(s) of them");
}

void check_broadcast(const std::string& name, const at::Tensor& input, const at::Tensor& other,
                     const Leaf& target) {
  if (input.sizes() == other.sizes()) return;
  const int64_t dim = target.batch_dim;
  if (input.dim() == other.dim() && dim < input.dim() && input.size(dim) == other.size(dim)) return;
  const bool one_row = dim >= 0 && dim < other.dim() && other.size(dim) == 1;
  throw InvalidArgument(name + ": the shapes " + shape_of(input) + " and " + shape_of(other) +
                        " differ in rank or in the number of samples, so that broadcasting would "
                        "pair each sample with others; " +
                        (one_row && input.dim() < other.dim() ? kSqueezed
                                                              : "give both the same shape, with "
                                                                "squeeze(-1) or unsqueeze(-1)"));
}

void check_samples(const std::string& name, const std::vector<at::Tensor>& tensors,
                   int64_t least_rank, const char* signature) {
  bool good = true;
  std::string shapes;
  for (const at::Tensor& tensor : tensors) {
    good = good && tensor.dim() >= least_rank && tensor.dim() == tensors.front().dim() &&
           tensor.size(0) == tensors.front().size(0);
    shapes += (shapes.empty() ? "" : ", ") + shape_of(tensor);
  }
  if (!good) {
    throw InvalidArgument(name + " takes " + signature + " with one entry per sample, but got " +
                          shapes);
  }
}

void check_weight(const std::string& name, const char* option, const at::Tensor& weight,
                  const at::Tensor& input, const Leaf& target, const char* as_target) {
  if (!weight.defined()) return;
  const int64_t dim = weight.dim() - input.dim() + target.batch_dim;
  if (dim < 0 || weight.size(dim) == 1) return;
  throw InvalidArgument(
      name + ": " + option + " of shape " + shape_of(weight) +
      " has an entry for each sample (the outputs of this micro-batch have shape " +
      shape_of(input) +
      ") and would have to be split with them; pass such weights with the targets, "
      "as " +
      as_target);
}

void check_reduction(const std::string& name, Reduction reduction) {
  if (reduction == Reduction::batchmean) {
    throw InvalidArgument(name + " knows the reductions 'mean' and 'sum'; 'batchmean' is kl_div's");
  }
}

at::Tensor rescaled(const at::Tensor& sum, Reduction reduction, int64_t counted, int64_t actual) {
  if (reduction != Reduction::mean || counted == actual) return sum;
  return sum.mul(static_cast<double>(counted) / static_cast<double>(actual));
}

SeparableLoss::Denominator count_elements(std::string name, Reduction reduction) {
  if (reduction == Reduction::sum) return nullptr;
  return [name = std::move(name)](const Batch& targets, int64_t) -> DenominatorPart {
    return static_cast<double>(target_leaf(name, targets, 0).tensor.numel());
  };
}

SeparableLoss::Denominator count_samples(Reduction reduction) {
  if (reduction == Reduction::sum) return nullptr;
  // Where time and batch are flattened each row is one for torch's mean.
  return [](const Batch& targets, int64_t samples) -> DenominatorPart {
    const auto& leaves = targets.leaves();
    const int64_t places = leaves.empty() ? 1 : leaves.front().places;
    return static_cast<double>(samples * places);
  };
}

}  // namespace losses
}  // namespace infinitybatch
