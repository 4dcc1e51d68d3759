#include "exactness/oracle.hpp"

#include <cmath>

namespace infinitybatch::testing {
namespace {

// A gradient this much smaller than the largest is rounding around a true zero: a bias in front of
// a normalisation, the keys' bias in attention.
constexpr double kTrueZero = 1e-12;

at::Tensor wide(const at::Tensor& tensor) {
  at::Tensor dense = tensor.is_sparse() ? tensor.to_dense() : tensor;
  if (dense.is_complex()) dense = at::view_as_real(dense.to(at::kComplexDouble));
  return dense.to(at::kDouble);
}

double finite_norm(const at::Tensor& tensor) {
  return tensor.masked_fill(tensor.isfinite().logical_not(), 0).norm().item<double>();
}

/// Norm of the difference, infinite where the two have nothing to do with each other.
double distance(const at::Tensor& value, const at::Tensor& reference) {
  if (value.defined() != reference.defined()) return INFINITY;
  if (!value.defined()) return 0;
  const at::Tensor a = wide(value), b = wide(reference);
  if (a.sizes() != b.sizes()) return INFINITY;
  if (!a.isnan().equal(b.isnan()) || !a.isfinite().equal(b.isfinite())) return INFINITY;
  return finite_norm(a - b);
}

double norm_of(const at::Tensor& tensor) {
  return tensor.defined() ? finite_norm(wide(tensor)) : 0;
}

void expect_within(const Gradients& ours, const std::vector<double>& found,
                   const std::vector<double>& allowed) {
  ASSERT_EQ(found.size(), allowed.size());
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_LE(found[i], allowed[i]) << (i == 0 ? "loss" : ours.parameters[i - 1].name);
  }
}

}  // namespace

Gradients gradients_of(Subject& subject, const at::Tensor& loss) {
  Gradients result{loss.detach().clone(), {}};
  for (const auto& item : subject.named_parameters()) {
    const at::Tensor& gradient = item.value().grad();
    result.parameters.push_back({item.key(), gradient.defined() ? gradient.clone() : gradient});
  }
  return result;
}

Gradients native(Subject& subject, const CriterionCase& criterion, const Data& data,
                 bool autocast) {
  subject.drop_gradients();
  at::Tensor loss;
  {
    const MaybeAutocast casting(autocast);
    const Batch outputs = subject.forward(data.inputs);
    loss = criterion.native(outputs.tensors(), data.targets.tensors());
  }
  loss.backward();
  Gradients result = gradients_of(subject, loss);
  subject.drop_gradients();
  subject.take_forwards();
  return result;
}

std::vector<double> errors(const Gradients& value, const Gradients& reference) {
  double largest = 0;
  for (const NamedParameter& parameter : reference.parameters) {
    largest = std::max(largest, norm_of(parameter.tensor));
  }
  const auto relative = [](double difference, double scale) {
    return difference == 0 ? 0 : difference / scale;
  };
  std::vector<double> result{
      relative(distance(value.loss, reference.loss), norm_of(reference.loss))};
  for (size_t i = 0; i < reference.parameters.size(); ++i) {
    const double own = norm_of(reference.parameters[i].tensor);
    result.push_back(relative(distance(value.parameters[i].tensor, reference.parameters[i].tensor),
                              own <= kTrueZero * largest ? largest : own));
  }
  return result;
}

void expect_exact_double(const Gradients& ours, const Gradients& reference,
                         const Gradients& reference_reversed) {
  std::vector<double> allowed = errors(reference_reversed, reference);
  // A value that reversing makes NaN gives no room.
  for (double& moved : allowed) moved = std::max(1e-12, std::isfinite(moved) ? 10 * moved : 0);
  expect_within(ours, errors(ours, reference), allowed);
}

void expect_exact_single(const Gradients& ours, const Gradients& reference, at::ScalarType type,
                         double roundings, const Data& data, int64_t samples,
                         const std::function<Gradients(const Data&)>& native_of) {
  const double epsilon = type == at::kFloat ? 0x1p-23 : type == at::kHalf ? 0x1p-10 : 0x1p-7;
  const std::vector<double> found = errors(ours, reference);
  std::vector<double> allowed(found.size(), roundings * epsilon);
  for (int64_t order = 0; order < 2 * samples; ++order) {
    const Data turned = rotated(data, order / 2);
    const std::vector<double> own =
        errors(native_of(order % 2 == 0 ? turned : reversed(turned)), reference);
    bool within = true;
    for (size_t i = 0; i < own.size(); ++i) {
      if (std::isfinite(own[i])) allowed[i] = std::max(allowed[i], 2 * own[i]);
      within = within && found[i] <= allowed[i];
    }
    if (within) return;
  }
  expect_within(ours, found, allowed);
}

}  // namespace infinitybatch::testing
