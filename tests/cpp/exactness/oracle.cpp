#include "exactness/oracle.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

namespace infinitybatch::testing {
namespace {

// A gradient this much smaller than the largest is rounding around a true zero: a bias in front of
// a normalisation, the keys' bias in attention.
constexpr double kTrueZero = 1e-12;

// Contract 1's roundings of the type, allowed whatever native's own error.
constexpr double kRoundings = 8;

// Ways in which native is asked for its own error in single precision.
constexpr size_t kWays = 40;

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
  if (value.scalar_type() != reference.scalar_type() &&
      !at::isFloatingType(reference.scalar_type()) && !at::isComplexType(reference.scalar_type())) {
    return INFINITY;  // integers are not rounded
  }
  if (!a.isnan().equal(b.isnan()) || !a.isfinite().equal(b.isfinite())) return INFINITY;
  const at::Tensor infinite = b.isinf();
  if (!a.masked_select(infinite).equal(b.masked_select(infinite))) return INFINITY;  // other signs
  return finite_norm(a - b);
}

double norm_of(const at::Tensor& tensor) {
  return tensor.defined() ? finite_norm(wide(tensor)) : 0;
}

/// The plain way first, then every number of rows, then those with random orders and scales.
std::vector<Way> native_ways(int64_t samples) {
  std::mt19937_64 generator(1);
  std::vector<int64_t> order(static_cast<size_t>(samples));
  std::iota(order.begin(), order.end(), 0);
  std::vector<Way> ways;
  int64_t rows = samples;
  while (ways.size() < kWays) {
    ways.push_back({order, rows, 1});
    if (ways.size() > order.size()) {
      std::shuffle(order.begin(), order.end(), generator);
      ways.back().order = order;
      // Between 1 and 2, in few enough bits for any type to hold it.
      ways.back().loss_scale = 1 + static_cast<double>(generator() % 64) / 64;
    }
    rows = rows > 1 ? rows - 1 : samples;
  }
  return ways;
}

std::vector<Excess> beyond(const Gradients& ours, const std::vector<double>& found,
                           const std::vector<double>& allowed) {
  std::vector<Excess> result;
  for (size_t i = 0; i < found.size(); ++i) {
    if (found[i] <= allowed[i]) continue;
    const bool named = i > 0 && i <= ours.parameters.size();
    result.push_back({named ? ours.parameters[i - 1].name : "loss", found[i], allowed[i]});
  }
  return result;
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

Gradients native(Subject& subject, const CriterionCase& criterion, const Data& data, bool autocast,
                 const Way& way) {
  const Data moved = way.order.empty() ? data : ordered(data, way.order);
  subject.drop_gradients();
  at::Tensor loss;
  {
    const MaybeAutocast casting(autocast);
    std::vector<Batch> outputs;
    if (way.rows == 0) {
      outputs.push_back(subject.forward(moved.inputs));
    } else {
      const int64_t samples = batch_size(moved.inputs, "inputs");
      for (int64_t begin = 0; begin < samples; begin += way.rows) {
        const int64_t end = std::min(begin + way.rows, samples);
        outputs.push_back(subject.forward(part(moved, begin, end).inputs));
      }
    }
    loss = criterion.native(joined(outputs).tensors(), moved.targets.tensors());
  }
  loss.backward(at::full_like(loss, way.loss_scale));
  Gradients result = gradients_of(subject, loss);
  if (way.loss_scale != 1) {
    for (NamedParameter& parameter : result.parameters) {
      if (parameter.tensor.defined()) parameter.tensor = wide(parameter.tensor) / way.loss_scale;
    }
  }
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
    const bool here =
        i < value.parameters.size() && value.parameters[i].name == reference.parameters[i].name;
    const double off =
        here ? distance(value.parameters[i].tensor, reference.parameters[i].tensor) : INFINITY;
    result.push_back(relative(off, own <= kTrueZero * largest ? largest : own));
  }
  if (value.parameters.size() > reference.parameters.size()) result[0] = INFINITY;
  return result;
}

std::vector<Excess> excess_in_double(const Gradients& ours, const Gradients& reference,
                                     const Gradients& reference_reversed) {
  std::vector<double> allowed = errors(reference_reversed, reference);
  // A value that reversing makes NaN gives no room.
  for (double& moved : allowed) moved = std::max(1e-12, std::isfinite(moved) ? 10 * moved : 0);
  return beyond(ours, errors(ours, reference), allowed);
}

std::vector<Excess> excess_in_single(const Gradients& ours, const Gradients& reference,
                                     at::ScalarType type, int64_t samples,
                                     const std::function<Gradients(const Way&)>& native_of) {
  const double epsilon = type == at::kFloat ? 0x1p-23 : type == at::kHalf ? 0x1p-10 : 0x1p-7;
  std::vector<double> found = errors(ours, reference);
  std::vector<double> allowed(found.size(), kRoundings * epsilon);
  for (const Way& way : native_ways(samples)) {
    const Gradients values = native_of(way);
    const std::vector<double> own = errors(values, reference);
    const std::vector<double> apart = errors(ours, values);
    bool within = true;
    for (size_t i = 0; i < own.size(); ++i) {
      if (std::isfinite(own[i])) {
        allowed[i] = std::max(allowed[i], 2 * own[i]);
      } else {
        found[i] = std::min(found[i], apart[i]);
      }
      within = within && found[i] <= allowed[i];
    }
    if (within) return {};
  }
  return beyond(ours, found, allowed);
}

}  // namespace infinitybatch::testing
