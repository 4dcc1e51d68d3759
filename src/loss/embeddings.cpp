#include "loss/embeddings.hpp"

#include "loss/arguments.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>

namespace infinitybatch::losses {

at::Tensor tensor_of(const std::string& name, const char* option, const Learnable& value) {
  at::Tensor tensor;
  if (const auto* given = std::get_if<at::Tensor>(&value)) tensor = *given;
  if (const auto* make = std::get_if<std::function<at::Tensor()>>(&value)) {
    if (*make) tensor = (*make)();
  }
  if (!std::holds_alternative<double>(value) && !tensor.defined()) {
    throw InvalidArgument(name + ": " + option + " is nothing; give a number or a tensor of one");
  }
  if (tensor.defined() && (tensor.numel() != 1 || !tensor.is_floating_point())) {
    throw InvalidArgument(name + ": " + option + " must be one floating point number, not " +
                          shape_of(tensor) + " of " + c10::toString(tensor.scalar_type()));
  }
  return tensor;
}

void check_positive(const std::string& name, const char* option, const Learnable& value,
                    const at::Tensor& tensor) {
  double number = 1;
  if (const double* plain = std::get_if<double>(&value)) number = *plain;
  if (tensor.defined() && tensor.is_cpu()) number = tensor.item<double>();
  if (number > 0) return;
  throw InvalidArgument(name + ": " + option + " must be above 0, not " + std::to_string(number) +
                        "; learn its logarithm, and give a function that takes exp() of it");
}

at::Tensor value_of(const Learnable& value, const at::Tensor& tensor, const at::Tensor& like) {
  if (!tensor.defined()) return at::full({}, std::get<double>(value), like.options());
  return tensor.detach().reshape({}).to(like.options());
}

std::pair<at::Tensor, at::Tensor> pair_of(const std::string& name, const Batch& outputs) {
  const std::vector<at::Tensor> tensors = outputs.tensors();
  if (tensors.size() == 2) return {tensors[0], tensors[1]};
  if (tensors.size() == 1 && tensors[0].dim() == 3 && tensors[0].size(1) == 2) {
    return {tensors[0].select(1, 0), tensors[0].select(1, 1)};
  }
  throw InvalidArgument(name + " takes outputs (a, b) of shapes (N, D), or one tensor (N, 2, D), " +
                        "but was given " + std::to_string(tensors.size()) + " tensor(s)" +
                        (tensors.empty() ? "" : ", the first " + shape_of(tensors[0])));
}

void check_pair(const std::string& name, const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) throw InvalidArgument(name + " takes two tensors (N, D)");
  if (a.dim() != 2 || b.dim() != 2 || a.size(1) != b.size(1)) {
    throw InvalidArgument(name + " takes embeddings of shapes (N, D) and (M, D), but was given " +
                          shape_of(a) + " and " + shape_of(b));
  }
  if (!a.is_floating_point() || a.scalar_type() != b.scalar_type() || a.device() != b.device()) {
    throw InvalidArgument(name +
                          " takes embeddings of one floating point type on one device, but "
                          "was given " +
                          c10::toString(a.scalar_type()) + " on " + a.device().str() + " and " +
                          c10::toString(b.scalar_type()) + " on " + b.device().str());
  }
}

void check_no_targets(const std::string& name, const Batch& targets) {
  if (targets.tensors().empty()) return;
  throw InvalidArgument(name + " takes no targets, but was given " +
                        std::to_string(targets.tensors().size()) + " tensor(s) of them");
}

at::Tensor reduced(const at::Tensor& sum, Reduction reduction, int64_t rows) {
  return reduction == Reduction::mean ? sum.div(static_cast<double>(rows)) : sum;
}

}  // namespace infinitybatch::losses
