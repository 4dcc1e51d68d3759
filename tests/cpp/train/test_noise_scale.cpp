// The gradient noise scale beside its definition, from one gradient a sample.

#include <torch/torch.h>

#include <infinitybatch/infinitybatch.hpp>

#include <gtest/gtest.h>

#include <utility>
#include <vector>

namespace infinitybatch {
namespace {

at::Tensor noise_flat_gradient(torch::nn::Linear& net, const at::Tensor& x, const at::Tensor& y) {
  net->zero_grad();
  torch::nn::functional::cross_entropy(net(x), y).backward();
  return torch::cat({net->weight.grad().flatten(), net->bias.grad()}).clone();
}

TEST(NoiseScale, IsTheVarianceOfGradientsOverTheirMean) {
  torch::manual_seed(1);
  torch::nn::Linear net(6, 4);
  net->to(torch::kDouble);
  const at::Tensor x = torch::randn({20, 6}, torch::kDouble);
  const at::Tensor y = torch::randint(4, {20});
  std::vector<at::Tensor> rows;
  for (int64_t i = 0; i < 20; ++i) {
    rows.push_back(noise_flat_gradient(net, x.slice(0, i, i + 1), y.slice(0, i, i + 1)));
  }
  const at::Tensor all = torch::stack(rows);
  const double variance = all.var(0).sum().item<double>();
  const double square = all.mean(0).square().sum().item<double>() - variance / 20;

  torch::optim::SGD sgd(net->parameters(), 0.1);
  std::vector<std::pair<at::Tensor, at::Tensor>> batches = {{x, y}};
  const auto noise = std::make_shared<NoiseScale>();
  Trainer trainer(make_gradient_step(net, losses::cross_entropy(), {.micro_batch_size = 1}),
                  optimizers::of(sgd), loaders::over(batches), {.callbacks = noise});
  trainer.run(1);
  EXPECT_NEAR(noise->averages().variance * 100, variance, 1e-9 * variance);
  if (square > 0) {
    EXPECT_NEAR(noise->noise_scale() * square, variance, 1e-9 * variance);
  } else {
    EXPECT_TRUE(std::isinf(noise->noise_scale()));
  }
}

TEST(NoiseScale, SaysWhatItCannotMeasure) {
  EXPECT_THROW(NoiseScale(1.0), InvalidArgument);
  NoiseScale noise;
  EXPECT_THROW(noise.noise_scale(), StateError);
  EXPECT_THROW(noise.end({}), StateError);
  noise.begin();
  StepReport report;
  report.strategy = "cut";
  EXPECT_THROW(noise.end(report), Unsupported);
}

}  // namespace
}  // namespace infinitybatch
