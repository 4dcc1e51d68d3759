// The user's own losses, penalties, and what the table of criteria cannot hold: ranges of half
// precision, parameters inside a loss, types of targets, concatenated CTC targets.
#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/loss/criteria.hpp>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

namespace infinitybatch {
namespace {

namespace F = torch::nn::functional;

double number(const DenominatorPart& part) {
  const at::Tensor* tensor = std::get_if<at::Tensor>(&part);
  return tensor ? tensor->item<double>() : std::get<double>(part);
}

TEST(Separable, CallsTheUsersFunctions) {
  const SeparableLoss loss = losses::separable(
      [](const Batch& outputs, const Batch& targets) {
        return (outputs.tensor() * targets.tensor()).sum();
      },
      [](const Batch& targets, int64_t samples) -> DenominatorPart {
        return static_cast<double>(targets.tensor().numel() + samples);
      });
  EXPECT_EQ(loss.name(), "separable");
  EXPECT_EQ(loss.sum(at::full({3}, 2.0), at::full({3}, 5.0)).item<double>(), 30);
  EXPECT_EQ(number(loss.denominator(at::zeros({3, 2}), 3)), 9);
  EXPECT_FALSE(loss.has_penalty());
  EXPECT_THROW(loss.penalty(), StateError);
}

TEST(Separable, WithoutDenominatorIsItsSum) {
  const SeparableLoss loss = losses::separable(
      [](const Batch& outputs, const Batch&) { return outputs.tensor().sum().reshape({1}); },
      nullptr);
  EXPECT_TRUE(std::holds_alternative<Undivided>(loss.denominator(at::zeros({3}), 3)));
  EXPECT_EQ(loss.sum(at::ones({3}), {}).dim(), 0);  // one number, whatever its shape
}

TEST(Separable, PenaltiesAddUp) {
  const at::Tensor parameter = at::full({2}, 3.0).requires_grad_();
  const SeparableLoss plain = losses::mse();
  const SeparableLoss one = plain.with_penalty([=] { return parameter.square().sum(); });
  const SeparableLoss two = one.with_penalty([=] { return parameter.sum(); });
  EXPECT_FALSE(plain.has_penalty());
  EXPECT_EQ(one.penalty().item<double>(), 18);
  EXPECT_EQ(two.penalty().item<double>(), 24);
  EXPECT_EQ(two.name(), "mse_loss");
  two.penalty().backward();
  EXPECT_TRUE(parameter.grad().equal(at::full({2}, 7.0)));
}

// Each sum is above 65504, the largest float16; native's mean is not.
TEST(HalfPrecision, SumsDoNotOverflow) {
  const at::Tensor far = at::full({64, 2}, 100.0, at::kHalf);
  EXPECT_EQ(losses::mse().sum(far, at::zeros({64, 2}, at::kHalf)).item<double>(), 1.28e6);
  EXPECT_EQ(losses::l1().sum(far.mul(10), at::zeros({64, 2}, at::kHalf)).item<double>(), 1.28e5);
  EXPECT_EQ(losses::huber().sum(far.mul(10), at::zeros({64, 2}, at::kHalf)).item<double>(),
            64 * 2 * (1000 - 0.5));
  const at::Tensor logits = at::tensor({0.0, 100.0}).to(at::kHalf).expand({1000, 2});
  EXPECT_EQ(losses::cross_entropy().sum(logits, at::zeros({1000}, at::kLong)).item<double>(), 1e5);
  const at::Tensor ones = at::full({64, 2}, 1e3, at::kHalf);
  EXPECT_EQ(losses::binary_cross_entropy_with_logits()
                .sum(ones, at::zeros({64, 2}, at::kHalf))
                .item<double>(),
            1.28e5);
}

TEST(Denominator, CountsInFloat64) {
  // 2^24 + 1 ones are 2^24 in float32.
  const int64_t count = (int64_t{1} << 24) + 1;
  const at::Tensor weight = at::ones({1}, at::kFloat);
  const at::Tensor targets = at::zeros({1}, at::kLong).expand({count});
  EXPECT_EQ(number(losses::nll({weight}).denominator(targets, count)), static_cast<double>(count));
  const at::Tensor each = at::ones({1}, at::kFloat).expand({count});
  const Batch weighted = Batch::tuple({each, each});
  EXPECT_EQ(number(losses::mse().denominator(weighted, count)), static_cast<double>(count));
}

TEST(Denominator, NeverTouchesClassesThatAreNotThere) {
  const double infinity = std::numeric_limits<double>::infinity();
  const at::Tensor weight = at::tensor({0.5, infinity, 2.0}, at::kDouble);
  const at::Tensor targets = at::tensor({int64_t{0}, int64_t{2}, int64_t{2}, int64_t{1}});
  const losses::NLLLossOptions options{weight, /*ignore_index=*/1};
  EXPECT_EQ(number(losses::nll(options).denominator(targets, 4)), 4.5);
}

TEST(Denominator, OfTargetsOutOfRangeIsAnError) {
  const at::Tensor targets = at::tensor({int64_t{0}, int64_t{3}});
  EXPECT_THROW(losses::nll({at::ones({3})}).denominator(targets, 2), c10::IndexError);
}

// uint8 labels cannot hold the default ignore_index of -100.
TEST(Denominator, TakesLabelsOfOneByte) {
  const at::Tensor targets = at::randint(0, 3, {6}, at::kByte);
  const at::Tensor logits = at::randn({6, 3}, at::kDouble);
  for (const at::Tensor& weight : {at::Tensor(), at::rand({3}, at::kDouble)}) {
    const SeparableLoss loss = losses::cross_entropy({weight});
    const double ours =
        loss.sum(logits, targets).item<double>() / number(loss.denominator(targets, 6));
    const double native =
        F::cross_entropy(logits, targets.to(at::kLong), F::CrossEntropyFuncOptions().weight(weight))
            .item<double>();
    EXPECT_NEAR(ours, native, 1e-12 * std::abs(native));
  }
}

// A weight of zero on every target that is there: native divides by zero, and so do we.
TEST(Denominator, OfZeroWeightsGivesNativesNaN) {
  const at::Tensor weight = at::tensor({0.0, 1.0}, at::kDouble);
  const at::Tensor targets = at::zeros({4}, at::kLong);
  const at::Tensor outputs = at::randn({4, 2}, at::kDouble).log_softmax(1);
  const auto leaf = [&] { return outputs.detach().clone().requires_grad_(); };
  const at::Tensor natives = leaf(), ours = leaf();
  F::nll_loss(natives, targets, F::NLLLossFuncOptions().weight(weight)).backward();
  const SeparableLoss loss = losses::nll({weight});
  const at::Tensor value = loss.sum(ours, targets).div(number(loss.denominator(targets, 4)));
  value.backward();
  EXPECT_TRUE(value.isnan().item<bool>());
  EXPECT_TRUE(ours.grad().isnan().equal(natives.grad().isnan())) << ours.grad() << natives.grad();
}

// The batch need not be the first dimension where a criterion works element by element.
TEST(BatchDimension, MayBeTheSecond) {
  const at::Tensor outputs = at::randn({3, 5, 2}, at::kDouble);
  for (int64_t width : {int64_t{2}, int64_t{1}}) {
    const Batch targets = Batch(at::randn({3, 5, width}, at::kDouble)).with_batch_dim(1);
    const SeparableLoss loss = losses::huber();
    double sum = 0, denominator = 0;
    for (auto [begin, end] : {std::pair(0, 2), std::pair(2, 5)}) {
      const Batch rows_here = rows(targets, begin, end);
      sum += loss.sum(outputs.slice(1, begin, end), rows_here).item<double>();
      denominator += number(loss.denominator(rows_here, end - begin));
    }
    const at::Tensor whole = targets.tensor().expand_as(outputs);
    EXPECT_NEAR(sum / denominator, F::huber_loss(outputs, whole).item<double>(), 1e-13);
  }
}

// Parameters inside a loss get the gradient that native gives them.
TEST(LinearCrossEntropy, TrainsItsOwnParameters) {
  const at::Tensor features = at::randn({7, 4}, at::kDouble);
  const at::Tensor targets = at::randint(0, 5, {7}, at::kLong);
  const at::Tensor weight = at::randn({5, 4}, at::kDouble).requires_grad_();
  const at::Tensor bias = at::randn({5}, at::kDouble).requires_grad_();
  F::cross_entropy(at::linear(features, weight, bias), targets).backward();
  const at::Tensor of_weight = weight.grad().clone(), of_bias = bias.grad().clone();
  weight.mutable_grad().reset();
  bias.mutable_grad().reset();

  const SeparableLoss loss = losses::linear_cross_entropy(weight, bias);
  const double denominator = number(loss.denominator(targets, 7));
  for (auto [begin, end] : {std::pair(0, 3), std::pair(3, 6), std::pair(6, 7)}) {
    loss.sum(features.slice(0, begin, end), targets.slice(0, begin, end))
        .div(denominator)
        .backward();
  }
  EXPECT_TRUE(at::allclose(weight.grad(), of_weight, 1e-12, 1e-15));
  EXPECT_TRUE(at::allclose(bias.grad(), of_bias, 1e-12, 1e-15));
}

TEST(CTC, PaddedTargetsGiveWhatConcatenatedOnesGive) {
  const at::Tensor log_probs = at::randn({9, 4, 5}, at::kDouble).log_softmax(2);
  const at::Tensor inputs = at::full({4}, 9, at::kLong);
  const at::Tensor lengths = at::tensor({int64_t{3}, int64_t{0}, int64_t{1}, int64_t{4}});
  const at::Tensor labels = at::randint(1, 5, {8}, at::kLong);
  const at::Tensor padded = losses::pad_ctc_targets(labels, lengths);
  ASSERT_EQ(padded.sizes(), at::IntArrayRef({4, 4}));

  const SeparableLoss loss = losses::ctc();
  double sum = 0;
  for (int64_t i = 0; i < 4; ++i) {
    const Batch targets = rows(Batch::tuple({padded, inputs, lengths}), i, i + 1);
    sum += loss.sum(log_probs.slice(1, i, i + 1), targets).item<double>();
  }
  const double native = F::ctc_loss(log_probs, labels, inputs, lengths).item<double>();
  EXPECT_NEAR(sum / 4, native, 1e-12 * native);
}

TEST(ReductionNames, AreTorchs) {
  EXPECT_EQ(parse_reduction("mean"), Reduction::mean);
  EXPECT_EQ(parse_reduction("sum"), Reduction::sum);
  EXPECT_EQ(parse_reduction("batchmean"), Reduction::batchmean);
}

TEST(Options, HaveTorchsDefaults) {
  EXPECT_EQ(losses::CrossEntropyLossOptions().ignore_index,
            F::CrossEntropyFuncOptions().ignore_index());
  EXPECT_EQ(losses::CrossEntropyLossOptions().label_smoothing,
            F::CrossEntropyFuncOptions().label_smoothing());
  EXPECT_EQ(losses::NLLLossOptions().ignore_index, F::NLLLossFuncOptions().ignore_index());
  EXPECT_EQ(losses::MultiMarginLossOptions().p, F::MultiMarginLossFuncOptions().p());
  EXPECT_EQ(losses::MultiMarginLossOptions().margin, F::MultiMarginLossFuncOptions().margin());
  EXPECT_EQ(losses::HuberLossOptions().delta, F::HuberLossFuncOptions().delta());
  EXPECT_EQ(losses::SmoothL1LossOptions().beta, F::SmoothL1LossFuncOptions().beta().value_or(1.0));
  EXPECT_EQ(losses::PoissonNLLLossOptions().eps, F::PoissonNLLLossFuncOptions().eps());
  EXPECT_EQ(losses::PoissonNLLLossOptions().full, F::PoissonNLLLossFuncOptions().full());
  EXPECT_EQ(losses::PoissonNLLLossOptions().log_input, F::PoissonNLLLossFuncOptions().log_input());
  EXPECT_EQ(losses::KLDivLossOptions().log_target, F::KLDivFuncOptions().log_target());
  EXPECT_EQ(losses::HingeEmbeddingLossOptions().margin,
            F::HingeEmbeddingLossFuncOptions().margin());
  EXPECT_EQ(losses::CosineEmbeddingLossOptions().margin,
            F::CosineEmbeddingLossFuncOptions().margin());
  EXPECT_EQ(losses::MarginRankingLossOptions().margin, F::MarginRankingLossFuncOptions().margin());
  EXPECT_EQ(losses::TripletMarginLossOptions().margin, F::TripletMarginLossFuncOptions().margin());
  EXPECT_EQ(losses::TripletMarginLossOptions().p, F::TripletMarginLossFuncOptions().p());
  EXPECT_EQ(losses::TripletMarginLossOptions().eps, F::TripletMarginLossFuncOptions().eps());
  EXPECT_EQ(losses::TripletMarginLossOptions().swap, F::TripletMarginLossFuncOptions().swap());
  EXPECT_EQ(losses::TripletMarginWithDistanceLossOptions().margin,
            F::TripletMarginWithDistanceLossFuncOptions().margin());
  EXPECT_EQ(losses::CTCLossOptions().blank, F::CTCLossFuncOptions().blank());
  EXPECT_EQ(losses::CTCLossOptions().zero_infinity, F::CTCLossFuncOptions().zero_infinity());
}

}  // namespace
}  // namespace infinitybatch
