// The head in tiles of rows is a linear layer and a cross entropy. The table of criteria has its
// options; here are tiles, sequences, the cap, tied weights and types.
#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/loss/linear_cross_entropy.hpp>

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <tuple>
#include <vector>

namespace infinitybatch::of_head {
namespace {

namespace F = torch::nn::functional;

at::Tensor leaf(const at::Tensor& tensor) {
  return tensor.detach().clone().requires_grad_();
}

at::Tensor capped(const at::Tensor& logits, double softcap) {
  return softcap > 0 ? softcap * at::tanh(logits / softcap) : logits;
}

void expect_close(const at::Tensor& ours, const at::Tensor& plain, double tolerance = 1e-12) {
  ASSERT_EQ(ours.sizes(), plain.sizes());
  EXPECT_LE((ours - plain).norm().item<double>(), tolerance * plain.norm().item<double>());
}

/// Rows, classes, rows a tile.
class Head : public ::testing::TestWithParam<std::tuple<int64_t, int64_t, int64_t>> {
 protected:
  void SetUp() override {
    at::manual_seed(0);
    const auto [rows, classes, tile] = GetParam();
    hidden = leaf(at::randn({rows, 5}, at::kDouble));
    weight = leaf(at::randn({classes, 5}, at::kDouble));
    bias = leaf(at::randn({classes}, at::kDouble));
    classes_ = classes;
    tile_ = tile;
  }

  void check(const at::Tensor& target, const losses::CrossEntropyLossOptions& options,
             double softcap) {
    const auto plain_options = F::CrossEntropyFuncOptions()
                                   .weight(options.weight)
                                   .ignore_index(options.ignore_index)
                                   .label_smoothing(options.label_smoothing);
    const at::Tensor plain =
        F::cross_entropy(capped(at::linear(hidden, weight, bias), softcap), target, plain_options);
    const at::Tensor ours =
        losses::linear_cross_entropy(hidden, weight, target, bias, options, {softcap, tile_});
    expect_close(ours, plain);
    const auto found = torch::autograd::grad({ours}, {hidden, weight, bias});
    const auto wanted = torch::autograd::grad({plain}, {hidden, weight, bias});
    for (size_t i = 0; i < wanted.size(); ++i) expect_close(found[i], wanted[i]);
  }

  at::Tensor hidden, weight, bias;
  int64_t classes_ = 0, tile_ = 0;
};

TEST_P(Head, IsTheLinearLayerAndTheCriterion) {
  at::Tensor target = at::randint(classes_, {hidden.size(0)}, at::kLong);
  if (hidden.size(0) > 2) target.slice(0, 1, hidden.size(0), 3).fill_(-7);
  at::Tensor weights = at::rand({classes_}, at::kDouble);
  weights[0] = 0;  // a class that counts for nothing
  for (const double softcap : {0.0, 1.5}) {
    check(target, {{}, -7, 0.0}, softcap);
    check(target, {{}, -7, 0.2}, softcap);
    if (hidden.size(0) > 2) check(target, {weights, -7, 0.0}, softcap);
    check(target, {weights + 0.1, -7, 0.2}, softcap);
    const at::Tensor probabilities = at::rand({hidden.size(0), classes_}, at::kDouble).softmax(1);
    check(probabilities, {{}, -7, 0.0}, softcap);
    check(probabilities, {weights, -7, 0.3}, softcap);
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, Head,
                         ::testing::Values(std::tuple(1, 4, 1), std::tuple(1, 4, 9),
                                           std::tuple(13, 7, 1), std::tuple(13, 7, 4),
                                           std::tuple(13, 7, 13), std::tuple(13, 7, 99)));

// The weight is the embedding too, and gets both gradients.
TEST(LinearCrossEntropyTiles, TiedWeightsOfSequences) {
  at::manual_seed(1);
  const at::Tensor words = at::randint(11, {3, 6}, at::kLong);
  const at::Tensor next = at::randint(11, {3, 6}, at::kLong);
  const at::Tensor table = leaf(at::randn({11, 4}, at::kDouble));
  const auto gradient = [&](const auto& loss) {
    const at::Tensor hidden = at::tanh(at::embedding(table, words));
    return torch::autograd::grad({loss(hidden)}, {table})[0];
  };
  const at::Tensor ours = gradient([&](const at::Tensor& hidden) {
    return losses::linear_cross_entropy(hidden, table, next, {}, {}, {0, 5});
  });
  const at::Tensor plain = gradient([&](const at::Tensor& hidden) {
    return F::cross_entropy(at::linear(hidden, table).flatten(0, 1), next.flatten());
  });
  expect_close(ours, plain);
}

TEST(LinearCrossEntropyTiles, OfTargetsThatAreAllIgnored) {
  const at::Tensor hidden = leaf(at::randn({3, 4}, at::kDouble));
  const at::Tensor weight = leaf(at::randn({5, 4}, at::kDouble));
  const at::Tensor ignored = at::full({3}, -100, at::kLong);
  EXPECT_TRUE(losses::linear_cross_entropy(hidden, weight, ignored).isnan().item<bool>());
  const at::Tensor sum =
      losses::linear_cross_entropy(hidden, weight, ignored, {}, {{}, -100, 0.1, Reduction::sum});
  EXPECT_EQ(sum.item<double>(), 0);
  sum.backward();
  EXPECT_EQ(hidden.grad().abs().sum().item<double>(), 0);
  EXPECT_EQ(weight.grad().abs().sum().item<double>(), 0);
}

// Products in bfloat16, as natively; sums over classes and tiles in float32.
TEST(LinearCrossEntropyTiles, UnderAutocastAndInHalfPrecision) {
  at::manual_seed(2);
  const at::Tensor exact_hidden = at::randn({300, 16}), exact_weight = at::randn({50, 16});
  const at::Tensor target = at::randint(50, {300}, at::kLong);
  const auto gradients = [&](at::ScalarType type, const auto& loss) {
    const at::Tensor hidden = leaf(exact_hidden.to(type)), weight = leaf(exact_weight.to(type));
    loss(hidden, weight).backward();
    EXPECT_EQ(hidden.grad().scalar_type(), type);
    EXPECT_EQ(weight.grad().scalar_type(), type);
    return std::vector<at::Tensor>{hidden.grad().to(at::kDouble), weight.grad().to(at::kDouble)};
  };
  const auto plain = [&](const at::Tensor& hidden, const at::Tensor& weight) {
    return F::cross_entropy(at::linear(hidden, weight).to(at::kFloat), target);
  };
  const auto tiled = [&](const at::Tensor& hidden, const at::Tensor& weight) {
    const at::Tensor value = losses::linear_cross_entropy(hidden, weight, target, {}, {}, {0, 32});
    EXPECT_TRUE(value.scalar_type() == at::kFloat || value.scalar_type() == at::kDouble);
    return value;
  };
  const auto truth = gradients(at::kDouble, tiled);
  const auto error = [&](const std::vector<at::Tensor>& found, size_t i) {
    return ((found[i] - truth[i]).norm() / truth[i].norm()).item<double>();
  };
  for (const bool autocast : {false, true}) {
    at::autocast::set_autocast_enabled(at::kCPU, autocast);
    const at::ScalarType type = autocast ? at::kFloat : at::kBFloat16;
    const auto natives = gradients(type, plain);
    const auto ours = gradients(type, tiled);
    at::autocast::set_autocast_enabled(at::kCPU, false);
    for (size_t i = 0; i < 2; ++i) EXPECT_LE(error(ours, i), 1.2 * error(natives, i) + 1e-4);
    EXPECT_GE(error(ours, 0), 1e-4);  // it did run in bfloat16
  }
  at::autocast::clear_cache();
}

TEST(LinearCrossEntropyTiles, RefusesWhatItCannotTake) {
  const at::Tensor hidden = at::rand({4, 3}), weight = at::rand({5, 3});
  const at::Tensor target = at::zeros({4}, at::kLong);
  const auto refused = [](const std::function<void()>& call, const std::string& message) {
    try {
      call();
      ADD_FAILURE() << "not refused: " << message;
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(message), std::string::npos) << error.what();
    }
  };
  refused([&] { losses::linear_cross_entropy(hidden, at::rand({5, 2}), target); }, "[5, 2]");
  refused([&] { losses::linear_cross_entropy(hidden, weight, at::zeros({5}, at::kLong)); }, "[5]");
  refused([&] { losses::linear_cross_entropy(hidden, weight, at::rand({4})); }, "[4, 5]");
  refused([&] { losses::linear_cross_entropy(hidden, weight.to(at::kDouble), target); }, "Double");
  refused([&] { losses::linear_cross_entropy(hidden, weight, target, at::rand({4})); }, "[4]");
  refused([&] { losses::linear_cross_entropy(hidden, weight, target, {}, {at::rand({4})}); },
          "5 classes");
  refused([&] { losses::linear_cross_entropy(weight, {}, {}, {-1.0}); }, "softcap");
  refused([&] { losses::linear_cross_entropy(weight, {}, {}, {0, 0}); }, "tile");
  const at::Tensor input = leaf(hidden);
  const at::Tensor value = losses::linear_cross_entropy(input, weight, target);
  EXPECT_THROW(torch::autograd::grad({value}, {input}, {}, true, true), Unsupported);
}

}  // namespace
}  // namespace infinitybatch::of_head
