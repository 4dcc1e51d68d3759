// Layers that mix samples, and buffers that depend on them: noticed, named, refused; and the ways
// out.
#include "step/support.hpp"

#include <infinitybatch/coupled/across_batch.hpp>

namespace infinitybatch::testing {
namespace {

nn::Sequential with_batch_norm() {
  torch::manual_seed(8);
  nn::Sequential net(nn::Linear(4, 6), nn::BatchNorm1d(6), nn::ReLU(), nn::Linear(6, 2));
  net->to(at::kDouble);
  return net;
}

struct Data {
  at::Tensor inputs = at::randn({8, 4}, at::kDouble), targets = at::randn({8, 2}, at::kDouble);
};

std::vector<at::Tensor> copies(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& tensor : tensors) result.push_back(tensor.clone());
  return result;
}

void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(a[i].equal(b[i])) << i;
}

/// Gradients and buffers, to fp64 rounding.
void expect_close(const nn::Module& found, const nn::Module& wanted) {
  const auto a = found.parameters(), b = wanted.parameters();
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(at::allclose(a[i].grad(), b[i].grad(), 1e-11, 1e-14)) << i;
  }
  for (size_t i = 0; i < found.buffers().size(); ++i) {
    EXPECT_TRUE(at::allclose(found.buffers()[i], wanted.buffers()[i], 1e-12, 1e-15)) << i;
  }
}

TEST(Coupling, BatchNormInTrainingIsExact) {
  auto net = with_batch_norm();
  const auto twin = std::dynamic_pointer_cast<nn::SequentialImpl>(net->clone());
  const Data data;
  VirtualBatch batch(net, losses::mse(), of_size(3));
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    twin->zero_grad();
    const StepReport report = batch.backward(data.inputs, data.targets);
    EXPECT_EQ(report.strategy, "cut");
    EXPECT_EQ(report.micro_batch_sizes, (std::vector<int64_t>{3, 3, 2}));
    at::mse_loss(twin->forward(data.inputs), data.targets).backward();
    expect_close(*net, *twin);
  }
}

TEST(Coupling, BatchNormInEvalIsExact) {
  auto net = with_batch_norm();
  net->eval();
  const Data data;
  const auto expected = torch::autograd::grad(
      {at::mse_loss(net->forward(data.inputs), data.targets)}, net->parameters());
  VirtualBatch(net, losses::mse(), of_size(3)).backward(data.inputs, data.targets);
  expect_gradients(*net, expected);
}

TEST(Coupling, OneMicroBatchOfAllIsExact) {
  auto net = with_batch_norm();
  const auto twin = std::dynamic_pointer_cast<nn::SequentialImpl>(net->clone());
  const Data data;
  for (const int64_t size : {8, 20}) {
    net->zero_grad();
    twin->zero_grad();
    VirtualBatch(net, losses::mse(), of_size(size)).backward(data.inputs, data.targets);
    at::mse_loss(twin->forward(data.inputs), data.targets).backward();
    for (size_t i = 0; i < net->parameters().size(); ++i) {
      // The bias in front of the normalisation has a true gradient of 0.
      if (i == 1) continue;
      EXPECT_LE(error(net->parameters()[i].grad(), twin->parameters()[i].grad()), 1e-12) << i;
    }
    expect_equal(net->buffers(), twin->buffers());
  }
}

TEST(Coupling, PerMicroBatchDoesWhatAccumulationDoes) {
  auto net = with_batch_norm();
  const auto twin = std::dynamic_pointer_cast<nn::SequentialImpl>(net->clone());
  const Data data;
  Options options = of_size(4);
  options.batch_coupling = BatchCoupling::per_micro_batch;
  VirtualBatch(net, losses::mse(), options).backward(data.inputs, data.targets);
  for (const int64_t begin : {0, 4}) {
    (at::mse_loss(twin->forward(data.inputs.slice(0, begin, begin + 4)),
                  data.targets.slice(0, begin, begin + 4)) /
     2)
        .backward();
  }
  for (size_t i = 0; i < net->parameters().size(); ++i) {
    if (i == 1) continue;
    EXPECT_LE(error(net->parameters()[i].grad(), twin->parameters()[i].grad()), 1e-12) << i;
  }
  expect_equal(net->buffers(), twin->buffers());
}

TEST(Coupling, BatchNormUnderABudgetIsExact) {
  auto net = with_batch_norm();
  const auto twin = std::dynamic_pointer_cast<nn::SequentialImpl>(net->clone());
  const Data data;
  Options options;
  options.memory_budget = "64MiB";
  VirtualBatch batch(net, losses::mse(), options);
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    twin->zero_grad();
    batch.backward(data.inputs, data.targets);
    at::mse_loss(twin->forward(data.inputs), data.targets).backward();
    expect_close(*net, *twin);
  }
}

TEST(Coupling, WithABudgetTooSmallForTheFrontiersItIsNamed) {
  nn::Sequential net(nn::Linear(16, 256), nn::BatchNorm1d(256), nn::Tanh(), nn::Linear(256, 2));
  const at::Tensor inputs = at::randn({2048, 16}), targets = at::randn({2048, 2});
  const auto buffers = copies(net->buffers());
  Options options;
  options.memory_budget = memory::stats(at::kCPU).live + (int64_t{1} << 20);
  options.offload.when = Offload::When::never;
  VirtualBatch batch(net, losses::mse(), options);
  for (int attempt = 0; attempt < 2; ++attempt) {
    expect_says(message_of<BudgetExceeded>([&] { batch.backward(inputs, targets); }),
                "in front of the one op that sees the whole batch");
    expect_equal(net->buffers(), buffers);
    EXPECT_FALSE(net->parameters()[0].grad().defined());
  }
}

struct Words : nn::Module {
  explicit Words(const nn::EmbeddingOptions& options) {
    torch::manual_seed(12);
    words = register_module("words", nn::Embedding(options));
    out = register_module("out", nn::Linear(3, 2));
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& ids) { return out(words(ids).sum(1)); }
  nn::Embedding words = nullptr;
  nn::Linear out = nullptr;
};

// It divides by how often a word occurs in the whole batch, in backward alone.
TEST(Coupling, EmbeddingThatScalesByFrequencyIsExact) {
  const auto net = std::make_shared<Words>(nn::EmbeddingOptions(5, 3).scale_grad_by_freq(true));
  const at::Tensor ids = at::randint(5, {6, 4}, at::kLong),
                   targets = at::randn({6, 2}, at::kDouble);
  const auto expected =
      torch::autograd::grad({at::mse_loss(net->forward(ids), targets)}, net->parameters());
  for (const int64_t size : {2, 4, 6}) {
    net->zero_grad();
    VirtualBatch(net, losses::mse(), of_size(size)).backward(ids, targets);
    expect_gradients(*net, expected);
  }
}

struct Deviation : nn::Module {
  Deviation() {
    torch::manual_seed(5);
    first = register_module("first", nn::Linear(4, 6));
    last = register_module("last", nn::Linear(7, 2));
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto spread = [](const std::vector<at::Tensor>& all) {
      return all[0].std(0, /*unbiased=*/false).mean().expand({all[0].size(0), 1});
    };
    const at::Tensor h = first(x).tanh();
    return last(at::cat({h, across_batch(spread, {h})}, 1));
  }
  nn::Linear first = nullptr, last = nullptr;
};

TEST(Coupling, AcrossBatchSeesAllSamples) {
  const auto net = std::make_shared<Deviation>();
  const Data data;
  const auto expected = torch::autograd::grad(
      {at::mse_loss(net->forward(data.inputs), data.targets)}, net->parameters());
  for (const int64_t size : {1, 3, 8}) {
    net->zero_grad();
    VirtualBatch(net, losses::mse(), of_size(size)).backward(data.inputs, data.targets);
    expect_gradients(*net, expected);
  }
  EXPECT_THROW(across_batch([](const auto& all) { return all[0].sum(); }, {data.inputs}),
               InvalidArgument);
}

// It rewrites rows of the weight in forward: put back when refused.
TEST(Coupling, EmbeddingWithMaxNormLeavesTheWeightOfTheWholeBatch) {
  const auto options = nn::EmbeddingOptions(5, 3).max_norm(0.5);
  const auto net = std::make_shared<Words>(options), twin = std::make_shared<Words>(options);
  const at::Tensor ids = at::randint(5, {6, 4}, at::kLong),
                   targets = at::randn({6, 2}, at::kDouble);
  EXPECT_EQ(VirtualBatch(net, losses::mse(), of_size(2)).backward(ids, targets).strategy, "stream");
  at::mse_loss(twin->forward(ids), targets).backward();
  EXPECT_TRUE(net->words->weight.equal(twin->words->weight));
  EXPECT_LE(error(net->words->weight.grad(), twin->words->weight.grad()), 1e-12);
}

/// A weight normalised by its largest singular value, which a vector follows by one step of power
/// iteration in each forward, as torch.nn.utils.spectral_norm does.
struct Spectral : nn::Module {
  Spectral() {
    torch::manual_seed(6);
    weight = register_parameter("weight", at::randn({3, 4}, at::kDouble));
    u = register_buffer("u", at::ones({3}, at::kDouble));
    calls = register_buffer("calls", at::zeros({}, at::kLong));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor v = at::mv(weight.detach().t(), u);
    const at::Tensor next = at::mv(weight.detach(), v / v.norm());
    {
      const at::NoGradGuard no_grad;
      u.copy_(next / next.norm());
      calls.add_(1);
    }
    const at::Tensor sigma = at::dot(u.clone(), at::mv(weight, v / v.norm()));
    return at::linear(x, weight / sigma);
  }
  at::Tensor weight, u, calls;
};

TEST(Coupling, ABufferThatEveryMicroBatchWritesAlikeIsWrittenOnce) {
  const auto net = std::make_shared<Spectral>();
  const auto twin = std::make_shared<Spectral>();
  const at::Tensor inputs = at::randn({7, 4}, at::kDouble),
                   targets = at::randn({7, 3}, at::kDouble);
  VirtualBatch batch(net, losses::mse(), of_size(2));
  for (int step = 1; step <= 3; ++step) {
    net->zero_grad();
    twin->zero_grad();
    batch.backward(inputs, targets);
    at::mse_loss(twin->forward(inputs), targets).backward();
    EXPECT_LE(error(net->weight.grad(), twin->weight.grad()), 1e-12) << step;
    EXPECT_TRUE(net->u.equal(twin->u)) << step;
    EXPECT_EQ(net->calls.item<int64_t>(), step);
  }
}

struct RunningMean : nn::Module {
  RunningMean() {
    weight = register_parameter("weight", at::ones({4}, at::kDouble));
    mean = register_buffer("mean", at::zeros({4}, at::kDouble));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::NoGradGuard no_grad;
    mean.mul_(0.9).add_(x.mean(0), 0.1);
    const at::AutoGradMode with_grad(true);
    return x * weight;
  }
  at::Tensor weight, mean;
};

TEST(Coupling, ABufferThatDependsOnTheSamplesIsRefusedAndRolledBack) {
  const auto net = std::make_shared<RunningMean>();
  const at::Tensor inputs = at::randn({6, 4}, at::kDouble);
  VirtualBatch batch(net, losses::mse(), of_size(2));
  std::string op;
  const auto message = message_of<CouplingError>([&] {
    try {
      batch.backward(inputs, inputs);
    } catch (const CouplingError& error) {
      op = error.op();
      throw;
    }
  });
  EXPECT_EQ(op, "mean");
  expect_says(message, "per_micro_batch");
  EXPECT_TRUE(net->mean.equal(at::zeros({4}, at::kDouble)));
  EXPECT_FALSE(net->weight.grad().defined());

  Options options = of_size(2);
  options.batch_coupling = BatchCoupling::per_micro_batch;
  VirtualBatch(net, losses::mse(), options).backward(inputs, inputs);
  at::Tensor expected = at::zeros({4}, at::kDouble);
  for (const int64_t begin : {0, 2, 4}) {
    expected.mul_(0.9).add_(inputs.slice(0, begin, begin + 2).mean(0), 0.1);
  }
  EXPECT_TRUE(net->mean.equal(expected));
}

}  // namespace
}  // namespace infinitybatch::testing
