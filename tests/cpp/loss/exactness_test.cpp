// Every criterion in every hard case: sums over micro-batches divided by the global denominator are
// native's loss over the whole batch, in value and in gradient.
#include "loss/criterion_cases.hpp"

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <optional>
#include <set>

namespace infinitybatch::testing {
namespace {

struct Result {
  at::Tensor loss;
  Tensors gradients;  // of the floating point outputs
};

/// The denominator of all targets, added up over pieces of `piece` samples.
std::optional<double> denominator(const SeparableLoss& loss, const Batch& targets, int64_t samples,
                                  int64_t piece) {
  double total = 0;
  for (int64_t begin = 0; begin < samples; begin += piece) {
    const int64_t end = std::min(begin + piece, samples);
    const DenominatorPart part = loss.denominator(rows(targets, begin, end), end - begin);
    if (std::holds_alternative<Undivided>(part)) return std::nullopt;
    const at::Tensor* tensor = std::get_if<at::Tensor>(&part);
    total += tensor ? tensor->item<double>() : std::get<double>(part);
  }
  return total;
}

/// The same outputs as leaves of their own graph.
Batch as_leaves(const Batch& outputs) {
  Batch leaves = outputs;
  for (Leaf& leaf : leaves.leaves()) {
    leaf.tensor = leaf.tensor.detach().clone();
    if (leaf.tensor.is_floating_point()) leaf.tensor.requires_grad_();
  }
  return leaves;
}

Result result_of(const at::Tensor& loss, const Batch& leaves) {
  Result result{loss.detach(), {}};
  for (const at::Tensor& tensor : leaves.tensors()) {
    if (tensor.requires_grad()) {
      result.gradients.push_back(tensor.grad().defined() ? tensor.grad() : at::zeros_like(tensor));
    }
  }
  return result;
}

Result native(const CriterionCase& criterion, const Batch& outputs, const Batch& targets) {
  const Batch leaves = as_leaves(outputs);
  const at::Tensor loss = criterion.native(leaves.tensors(), targets.tensors());
  loss.backward();
  return result_of(loss, leaves);
}

Result ours(const CriterionCase& criterion, const Batch& outputs, const Batch& targets,
            const std::vector<int64_t>& sizes, int64_t piece, const at::TensorOptions& options) {
  const Batch leaves = as_leaves(outputs);
  const SeparableLoss loss = criterion.loss(options);
  const int64_t samples = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  const std::optional<double> divisor = denominator(loss, targets, samples, piece);
  at::Tensor total;
  int64_t begin = 0;
  for (int64_t size : sizes) {
    at::Tensor share =
        loss.sum(rows(leaves, begin, begin + size), rows(targets, begin, begin + size));
    EXPECT_EQ(share.dim(), 0);
    if (divisor) share = share.div(*divisor);
    share.backward();
    total = total.defined() ? total.add(share.detach()) : share.detach();
    begin += size;
  }
  return result_of(total, leaves);
}

/// The largest relative error; inf and NaN must stand in the same places.
double error(const at::Tensor& value, const at::Tensor& reference) {
  const at::Tensor a = value.to(at::kDouble), b = reference.to(at::kDouble);
  if (a.sizes() != b.sizes()) return INFINITY;
  const at::Tensor finite = b.isfinite();
  if (!a.isfinite().equal(finite)) return INFINITY;
  if (!a.isnan().equal(b.isnan())) return INFINITY;
  if (!finite.any().item<bool>()) return 0;
  const at::Tensor difference = a.sub(b).masked_fill(finite.logical_not(), 0).abs().max();
  const double scale = b.masked_fill(finite.logical_not(), 0).abs().max().item<double>();
  return difference.item<double>() / std::max(scale, 1e-300);
}

double error(const Result& value, const Result& reference) {
  double worst = error(value.loss, reference.loss);
  for (size_t i = 0; i < reference.gradients.size(); ++i) {
    worst = std::max(worst, error(value.gradients[i], reference.gradients[i]));
  }
  return worst;
}

struct Data {
  Batch outputs, targets;
};

Data data_of(const CriterionCase& criterion, int64_t samples, const at::TensorOptions& options,
             uint64_t seed = 7) {
  Draw features(samples, at::TensorOptions(at::kDouble), seed);
  Draw targets(samples, options, seed + 1);
  return {criterion.head(features.normal({criterion.features}).to(options)),
          criterion.targets(targets)};
}

class EveryCriterion : public ::testing::TestWithParam<CriterionCase> {
 protected:
  // A few numbers each: threads only wait for each other, twenty times as long on a busy machine.
  static void SetUpTestSuite() { at::set_num_threads(1); }
};

TEST_P(EveryCriterion, EqualsNativeForEverySplit) {
  const CriterionCase& criterion = GetParam();
  const at::TensorOptions options(at::kDouble);
  const std::vector<std::vector<int64_t>> splits = {
      {7}, {1, 1, 1, 1, 1, 1, 1}, {3, 3, 1}, {2, 5}, {4, 3}, {6, 1}, {1}, {2, 2, 2}};
  for (const std::vector<int64_t>& sizes : splits) {
    const int64_t samples = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
    const Data data = data_of(criterion, samples, options);
    const Result reference = native(criterion, data.outputs, data.targets);
    if (criterion.finite) {
      ASSERT_TRUE(reference.loss.isfinite().item<bool>()) << reference.loss;
    } else {
      ASSERT_FALSE(reference.loss.isfinite().item<bool>()) << reference.loss;
    }
    // Targets are counted in pieces that need not be the micro-batches.
    const int64_t piece = 1 + static_cast<int64_t>(sizes.size()) % samples;
    const Result result = ours(criterion, data.outputs, data.targets, sizes, piece, options);
    EXPECT_LE(error(result, reference), 1e-12)
        << samples << " samples, " << sizes.size() << " micro-batches, loss " << result.loss
        << " instead of " << reference.loss;
  }
}

// In float32 our error is that of native or a few roundings.
TEST_P(EveryCriterion, IsAsGoodAsNativeInFloat32) {
  const CriterionCase& criterion = GetParam();
  const at::TensorOptions single(at::kFloat);
  const Data data = data_of(criterion, 12, single);
  const auto wide = [](Batch batch) {
    for (Leaf& leaf : batch.leaves()) {
      if (leaf.tensor.defined() && leaf.tensor.is_floating_point()) {
        leaf.tensor = leaf.tensor.to(at::kDouble);
      }
    }
    return batch;
  };
  const Result exact = native(criterion, wide(data.outputs), wide(data.targets));
  const double natives = error(native(criterion, data.outputs, data.targets), exact);
  const Result result = ours(criterion, data.outputs, data.targets, {5, 5, 2}, 12, single);
  EXPECT_EQ(result.loss.scalar_type(), at::kFloat);
  EXPECT_LE(error(result, exact), std::max(2 * natives, 8 * 1.2e-7));
}

// Half precision outputs are summed in float32: as native on the same numbers in float32, up to the
// rounding of the gradients to the outputs' type.
TEST_P(EveryCriterion, SumsHalfPrecisionInFloat32) {
  const CriterionCase& criterion = GetParam();
  for (at::ScalarType type : {at::kHalf, at::kBFloat16}) {
    const auto cast = [](Batch batch, at::ScalarType to) {
      for (Leaf& leaf : batch.leaves()) {
        if (leaf.tensor.defined() && leaf.tensor.is_floating_point()) {
          leaf.tensor = leaf.tensor.to(to);
        }
      }
      return batch;
    };
    const at::TensorOptions single(at::kFloat);
    const Data data = data_of(criterion, 9, single);
    const Batch outputs = cast(data.outputs, type), targets = cast(data.targets, type);
    // Weights are float32 in one and half in the other: 0.5, 0.8, ... are rounded.
    const Result reference =
        native(criterion, cast(outputs, at::kFloat), cast(targets, at::kFloat));
    const Result result =
        ours(criterion, outputs, targets, {4, 4, 1}, 9,
             single.dtype(criterion.name.starts_with("linear") ? type : at::kFloat));
    EXPECT_EQ(result.loss.scalar_type(), at::kFloat);
    const bool computes_in_half = criterion.name.starts_with("linear") ||
                                  criterion.name.find("distance_loss/cosine") != std::string::npos;
    const double rounding = type == at::kHalf ? 1e-3 : 8e-3;
    EXPECT_LE(error(result.loss, reference.loss), computes_in_half ? 4 * rounding : 2e-6);
    for (size_t i = 0; i < reference.gradients.size(); ++i) {
      EXPECT_EQ(result.gradients[i].scalar_type(), type);
      EXPECT_LE(error(result.gradients[i], reference.gradients[i]),
                computes_in_half ? 16 * rounding : 2 * rounding);
    }
  }
}

class Autocast {
 public:
  Autocast() {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  }
  ~Autocast() {
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::clear_cache();
  }
};

// Under autocast torch's own policy decides, for float32 outputs as for lower ones.
TEST_P(EveryCriterion, FollowsAutocast) {
  const CriterionCase& criterion = GetParam();
  const at::TensorOptions options(at::kFloat);
  const Data data = data_of(criterion, 8, options);
  const Autocast autocast;
  const Result reference = native(criterion, data.outputs, data.targets);
  const Result result = ours(criterion, data.outputs, data.targets, {3, 3, 2}, 8, options);
  // Linear layers round to bfloat16 in both; where they do, sums differ in that rounding.
  const bool rounds = criterion.name.starts_with("linear");
  EXPECT_LE(error(result, reference), rounds ? 3e-2 : 3e-6);
}

TEST_P(EveryCriterion, IsNamedAsTorchNamesIt) {
  const CriterionCase& criterion = GetParam();
  EXPECT_EQ(criterion.name.substr(0, criterion.name.find('/')),
            criterion.loss(at::TensorOptions(at::kDouble)).name());
}

INSTANTIATE_TEST_SUITE_P(Loss, EveryCriterion, ::testing::ValuesIn(criterion_cases()),
                         [](const auto& info) { return test_name(info.param); });

TEST(CriterionTable, HasEverySeparableCriterionOfTorch) {
  std::set<std::string> found;
  for (const CriterionCase& criterion : criterion_cases()) {
    found.insert(criterion.name.substr(0, criterion.name.find('/')));
  }
  const std::set<std::string> wanted = {"binary_cross_entropy",
                                        "binary_cross_entropy_with_logits",
                                        "cosine_embedding_loss",
                                        "cross_entropy",
                                        "ctc_loss",
                                        "gaussian_nll_loss",
                                        "hinge_embedding_loss",
                                        "huber_loss",
                                        "kl_div",
                                        "l1_loss",
                                        "linear_cross_entropy",
                                        "margin_ranking_loss",
                                        "mse_loss",
                                        "multi_margin_loss",
                                        "multilabel_margin_loss",
                                        "multilabel_soft_margin_loss",
                                        "nll_loss",
                                        "poisson_nll_loss",
                                        "smooth_l1_loss",
                                        "soft_margin_loss",
                                        "triplet_margin_loss",
                                        "triplet_margin_with_distance_loss"};
  EXPECT_EQ(found, wanted);
}

}  // namespace
}  // namespace infinitybatch::testing
