// Contrastive losses in tiles are the plain formulas on the matrix of all scores, in value and in
// every gradient.
#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/loss/contrastive.hpp>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <tuple>
#include <vector>

namespace infinitybatch {
namespace {

using Tensors = std::vector<at::Tensor>;

at::Tensor unit(const at::Tensor& x) {
  return x / x.norm(2, 1, true).clamp_min(1e-12);
}

at::Tensor leaf(const at::Tensor& tensor) {
  return tensor.detach().clone().requires_grad_();
}

struct Gradients {
  at::Tensor value;
  Tensors gradients;
};

Gradients of(const at::Tensor& value, const Tensors& leaves) {
  return {value.detach(), torch::autograd::grad({value}, leaves)};
}

/// Relative to the gradient's norm; one that is truly zero to the largest.
void expect_equal(const Gradients& ours, const Gradients& plain, double tolerance = 1e-12) {
  EXPECT_NEAR(ours.value.item<double>(), plain.value.item<double>(),
              tolerance * std::max(1e-3, std::abs(plain.value.item<double>())));
  double largest = 0;
  for (const at::Tensor& gradient : plain.gradients) {
    largest = std::max(largest, gradient.norm().item<double>());
  }
  for (size_t i = 0; i < plain.gradients.size(); ++i) {
    ASSERT_EQ(ours.gradients[i].sizes(), plain.gradients[i].sizes());
    const double error = (ours.gradients[i] - plain.gradients[i]).norm().item<double>();
    const double norm = plain.gradients[i].norm().item<double>();
    EXPECT_LE(error, tolerance * (norm > 1e-8 * largest ? norm : largest)) << "gradient " << i;
  }
}

at::Tensor plain_info_nce(at::Tensor a, at::Tensor b, const at::Tensor& temperature, bool normalize,
                          bool symmetric) {
  if (normalize) std::tie(a, b) = std::pair(unit(a), unit(b));
  const at::Tensor scores = a.mm(b.t()) / temperature;
  const at::Tensor own = at::arange(a.size(0), at::kLong);
  const at::Tensor loss = at::cross_entropy_loss(scores, own);
  return symmetric ? (loss + at::cross_entropy_loss(scores.t(), own)) / 2 : loss;
}

at::Tensor plain_siglip(at::Tensor a, at::Tensor b, const at::Tensor& temperature,
                        const at::Tensor& bias) {
  std::tie(a, b) = std::pair(unit(a), unit(b));
  const at::Tensor scores = a.mm(b.t()) / temperature + bias;
  const at::Tensor signs = 2 * at::eye(a.size(0), b.size(0), at::kDouble) - 1;
  return -at::log_sigmoid(signs * scores).sum() / static_cast<double>(a.size(0));
}

at::Tensor plain_sup_con(const at::Tensor& x, const at::Tensor& labels,
                         const at::Tensor& temperature) {
  const at::Tensor z = unit(x);
  const at::Tensor scores = z.mm(z.t()) / temperature;
  const at::Tensor own = at::eye(x.size(0), at::kBool);
  const at::Tensor others = scores.masked_fill(own, -INFINITY);
  const at::Tensor logarithms = scores - others.logsumexp(1, true);
  const at::Tensor same = labels.unsqueeze(1).eq(labels).logical_and(own.logical_not());
  const at::Tensor count = same.sum(1);
  const at::Tensor loss = -(logarithms * same).sum(1) / count.clamp_min(1);
  return at::where(count.gt(0), loss, at::zeros_like(loss)).mean();
}

/// The number of pairs, of features, and of rows a tile: ragged, one, more than there are.
class Contrastive : public testing::TestWithParam<std::tuple<int64_t, int64_t, int64_t>> {
 protected:
  void SetUp() override {
    at::manual_seed(0);
    const auto [rows, features, tile] = GetParam();
    a = leaf(at::randn({rows, features}, at::kDouble));
    b = leaf(at::randn({rows, features}, at::kDouble));
    tile_ = tile;
    temperature = leaf(at::full({}, 0.3, at::kDouble));
  }

  at::Tensor a, b, temperature;
  int64_t tile_ = 0;
};

TEST_P(Contrastive, InfoNCE) {
  for (const bool symmetric : {false, true}) {
    for (const bool normalize : {false, true}) {
      const losses::InfoNCELossOptions options{temperature, normalize, symmetric, Reduction::mean,
                                               tile_};
      expect_equal(
          of(losses::info_nce(a, b, options), {a, b, temperature}),
          of(plain_info_nce(a, b, temperature, normalize, symmetric), {a, b, temperature}));
    }
  }
}

TEST_P(Contrastive, MoreNegatives) {
  const at::Tensor more = leaf(at::randn({b.size(0) + 5, b.size(1)}, at::kDouble));
  const losses::InfoNCELossOptions options{temperature, true, /*symmetric=*/false, Reduction::mean,
                                           tile_};
  expect_equal(of(losses::info_nce(a, more, options), {a, more, temperature}),
               of(plain_info_nce(a, more, temperature, true, false), {a, more, temperature}));
  const at::Tensor bias = leaf(at::full({1}, -2.0, at::kDouble));
  expect_equal(of(losses::siglip(a, more, {temperature, bias, true, Reduction::mean, tile_}),
                  {a, more, temperature, bias}),
               of(plain_siglip(a, more, temperature, bias), {a, more, temperature, bias}));
}

TEST_P(Contrastive, SigLIP) {
  const at::Tensor bias = leaf(at::full({}, -2.0, at::kDouble));
  const losses::SigLIPLossOptions options{temperature, bias, true, Reduction::mean, tile_};
  expect_equal(of(losses::siglip(a, b, options), {a, b, temperature, bias}),
               of(plain_siglip(a, b, temperature, bias), {a, b, temperature, bias}));
}

// The first embedding is the only one of its label.
TEST_P(Contrastive, SupCon) {
  at::Tensor labels = at::arange(a.size(0), at::kLong).remainder(3);
  labels[0] = 17;
  const losses::SupConLossOptions options{temperature, true, Reduction::mean, tile_};
  const at::Tensor ours = losses::sup_con(a, labels, options);
  if (a.size(0) == 1) {  // the plain formula has no number for it
    EXPECT_EQ(ours.item<double>(), 0);
    return;
  }
  expect_equal(of(ours, {a, temperature}),
               of(plain_sup_con(a, labels, temperature), {a, temperature}));
}

// Two views of each sample and no labels: SimCLR.
TEST_P(Contrastive, Views) {
  const at::Tensor views = leaf(at::stack({a, b}, 1));
  const losses::SupConLossOptions options{temperature, true, Reduction::mean, tile_};
  const at::Tensor labels = at::arange(a.size(0), at::kLong).repeat_interleave(2);
  const at::Tensor flat = views.reshape({-1, a.size(1)});
  expect_equal(of(losses::sup_con(views, {}, options), {views, temperature}),
               of(plain_sup_con(flat, labels, temperature), {views, temperature}));
}

// InfoNCE written as a function of a tile, with a temperature that autograd knows only from inside.
TEST_P(Contrastive, Pairwise) {
  const losses::PairwiseFunction function = [&](const at::Tensor& rows, const at::Tensor& columns,
                                                const at::Tensor& positions, const Batch&) {
    return at::cross_entropy_loss(rows.mm(columns.t()) / temperature, positions, {},
                                  at::Reduction::Sum);
  };
  const at::Tensor ours = losses::pairwise(a, b, function, {}, {Reduction::mean, tile_});
  expect_equal(of(ours, {a, b, temperature}),
               of(plain_info_nce(a, b, temperature, false, false), {a, b, temperature}));
  // With itself, and a factor that has a history of its own, which each tile goes through.
  const at::Tensor squared = temperature.square();
  const losses::PairwiseFunction close = [&](const at::Tensor& rows, const at::Tensor& columns,
                                             const at::Tensor&, const Batch&) {
    return at::exp(rows.mm(columns.t()).mul(squared).mul(0.1)).sum();
  };
  expect_equal(of(losses::pairwise(a, a, close, {}, {Reduction::sum, tile_}), {a, temperature}),
               of(at::exp(a.mm(a.t()).mul(temperature.square()).mul(0.1)).sum(), {a, temperature}));
}

INSTANTIATE_TEST_SUITE_P(Sizes, Contrastive,
                         testing::Values(std::tuple(1, 3, 1), std::tuple(1, 3, 5),
                                         std::tuple(2, 4, 1), std::tuple(7, 5, 3),
                                         std::tuple(7, 5, 7), std::tuple(33, 6, 1),
                                         std::tuple(33, 6, 8), std::tuple(33, 6, 100)));

TEST(ContrastiveLoss, SumsAndHalves) {
  at::manual_seed(1);
  const at::Tensor a = at::randn({6, 3}, at::kDouble);
  const at::Tensor b = at::randn({6, 3}, at::kDouble);
  const double mean = losses::info_nce(a, b).item<double>();
  losses::InfoNCELossOptions options;
  options.reduction = Reduction::sum;
  EXPECT_NEAR(losses::info_nce(a, b, options).item<double>(), 6 * mean, 1e-12);
  for (const at::ScalarType type : {at::kHalf, at::kBFloat16}) {
    const at::Tensor half = leaf(a.to(type));
    const at::Tensor value = losses::info_nce(half, b.to(type));
    EXPECT_EQ(value.scalar_type(), at::kFloat);
    value.backward();
    EXPECT_EQ(half.grad().scalar_type(), type);
    EXPECT_NEAR(
        value.item<double>(),
        losses::info_nce(a.to(type).to(at::kDouble), b.to(type).to(at::kDouble)).item<double>(),
        1e-5);
  }
}

// Nothing that is not wanted, frozen towers included, gets a gradient or a graph.
TEST(ContrastiveLoss, GivesWhatIsWanted) {
  at::manual_seed(2);
  const at::Tensor a = at::randn({5, 3}, at::kDouble), b = leaf(at::randn({5, 3}, at::kDouble));
  const at::Tensor temperature = leaf(at::full({1}, 0.4, at::kDouble));
  losses::InfoNCELossOptions options;
  options.temperature = temperature;
  const at::Tensor value = losses::info_nce(a, b, options);
  const Gradients plain = of(plain_info_nce(a, b, temperature, true, true), {b, temperature});
  expect_equal(of(value, {b, temperature}), plain);
  const at::Tensor frozen = losses::info_nce(a, b.detach(), options);
  expect_equal(of(frozen, {temperature}), {plain.value, {plain.gradients[1]}});
  const at::NoGradGuard no_grad;
  EXPECT_FALSE(losses::info_nce(a, b, options).requires_grad());
}

// Strides of any kind, and an embedding of length zero.
TEST(ContrastiveLoss, TakesAnyStridesAndZeros) {
  at::manual_seed(3);
  at::Tensor wide = at::randn({4, 6}, at::kDouble);
  wide.select(1, 0).fill_(0);
  const at::Tensor a = leaf(wide), b = leaf(at::randn({12, 8}, at::kDouble));
  const auto views = [&] { return std::pair(a.t(), b.slice(0, 0, 12, 2).slice(1, 0, 8, 2)); };
  const at::Tensor temperature = at::full({}, 0.5, at::kDouble);
  losses::InfoNCELossOptions options;
  options.temperature = 0.5;
  options.tile = 4;
  const at::Tensor ours = losses::info_nce(views().first, views().second, options);
  const at::Tensor plain = plain_info_nce(views().first, views().second, temperature, true, true);
  expect_equal(of(ours, {a, b}), of(plain, {a, b}));
}

// Scores of +-1000: a sum of exponentials that is not shifted would be infinite or zero.
TEST(ContrastiveLoss, SurvivesLargeScores) {
  at::manual_seed(4);
  const at::Tensor a = leaf(at::randn({9, 4}, at::kDouble)),
                   b = leaf(at::randn({9, 4}, at::kDouble));
  const at::Tensor temperature = at::full({}, 1e-3, at::kDouble);
  losses::InfoNCELossOptions options;
  options.temperature = 1e-3;
  options.tile = 2;
  expect_equal(of(losses::info_nce(a, b, options), {a, b}),
               of(plain_info_nce(a, b, temperature, true, true), {a, b}));
  expect_equal(of(losses::siglip(a, b, {1e-3, 0.0, true, Reduction::mean, 2}), {a, b}),
               of(plain_siglip(a, b, temperature, at::zeros({}, at::kDouble)), {a, b}));
}

TEST(ContrastiveLoss, EmptyBatches) {
  const at::Tensor none = leaf(at::zeros({0, 3}, at::kDouble));
  losses::InfoNCELossOptions options;
  options.reduction = Reduction::sum;
  const at::Tensor value = losses::info_nce(none, none, options);
  EXPECT_EQ(value.item<double>(), 0);
  value.backward();
  EXPECT_EQ(none.grad().numel(), 0);
  EXPECT_TRUE(losses::siglip(none, none).isnan().item<bool>());  // the mean of nothing, as natively
}

TEST(ContrastiveLoss, BackwardTwiceAndOfBackward) {
  const at::Tensor a = leaf(at::rand({4, 3}, at::kDouble)), b = leaf(at::rand({4, 3}, at::kDouble));
  const at::Tensor value = losses::info_nce(a, b);
  value.backward({}, /*retain_graph=*/true);
  const at::Tensor once = a.grad().clone();
  value.backward();
  EXPECT_TRUE(at::allclose(a.grad(), 2 * once, 1e-15, 0));
  EXPECT_THROW(value.backward(), StateError);
  EXPECT_THROW(torch::autograd::grad({losses::info_nce(a, b)}, {a}, {}, true, true), Unsupported);
}

TEST(ContrastiveLoss, RefusesWhatItCannotTake) {
  const at::Tensor a = at::rand({4, 3}), b = at::rand({4, 3});
  const auto refused = [](const std::function<void()>& call, const std::string& message) {
    try {
      call();
      ADD_FAILURE() << "not refused: " << message;
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(message), std::string::npos) << error.what();
    }
  };
  const auto with_tile = [](int64_t tile) {
    losses::InfoNCELossOptions options;
    options.tile = tile;
    return options;
  };
  const auto with_temperature = [](losses::Learnable temperature) {
    losses::InfoNCELossOptions options;
    options.temperature = std::move(temperature);
    return options;
  };
  refused([&] { losses::info_nce(a, at::rand({4, 2})); }, "[4, 2]");
  refused([&] { losses::info_nce(a, at::rand({5, 3})); }, "symmetric=false");
  refused([&] { losses::siglip(a, at::rand({3, 3})); }, "4 embeddings need as many partners");
  refused([&] { losses::info_nce(a, b.to(at::kDouble)); }, "Double");
  refused([&] { losses::info_nce(a.to(at::kLong), b.to(at::kLong)); }, "floating point");
  refused([&] { losses::info_nce(with_tile(0)); }, "1 or more, not 0");
  refused([&] { losses::info_nce(with_temperature(0.0)); }, "above 0");
  refused([&] { losses::info_nce(a, b, with_temperature(at::full({}, -1.0))); }, "above 0");
  refused([&] { losses::info_nce(a, b, with_temperature(at::rand({2}))); }, "[2]");
  refused([&] { losses::info_nce(a, b, with_temperature(at::Tensor())); }, "nothing");
  refused([&] { losses::sup_con(a, at::rand({4})); }, "integer label");
  refused([&] { losses::sup_con(a, at::zeros({3}, at::kLong)); }, "[3]");
  refused([&] { losses::sup_con(at::rand({4}), {}); }, "(N, D)");
  refused([&] { losses::pairwise(a, b, nullptr); }, "function");
  refused([&] { losses::pairwise(a, b, [](auto& rows, auto&, auto&, auto&) { return rows; }); },
          "scalar tensor");
  refused([&] { losses::info_nce().value(Batch::tuple({a}), {}); }, "1 tensor(s)");
  refused([&] { losses::info_nce().value(Batch::tuple({a, b}), a); }, "no targets");
  losses::InfoNCELossOptions options;
  options.reduction = Reduction::batchmean;
  refused([&] { losses::info_nce(options); }, "batchmean");
}

}  // namespace
}  // namespace infinitybatch
