// Losses that see the outputs of all samples, from C++: gradients, graphs that are kept, parameters
// of the loss, buffers, random numbers and what is refused.
#include "execute/schedule.hpp"
#include "step/support.hpp"

#include <cmath>

namespace infinitybatch::testing {
namespace {

/// Two towers over one trunk with dropout, and a counter in a buffer.
struct Towers : nn::Module {
  explicit Towers(double dropout) : dropout(dropout) {
    trunk = register_module("trunk", nn::Linear(5, 7));
    left = register_module("left", nn::Linear(7, 4));
    right = register_module("right", nn::Linear(7, 4));
    forwards = register_buffer("forwards", at::zeros({}, at::kLong));
    to(at::kDouble);
    forwards.set_data(forwards.to(at::kLong));
  }
  Batch forward(const Batch& inputs) {
    ++calls;
    forwards.add_(1);
    const at::Tensor hidden =
        at::dropout(at::tanh(trunk(inputs.tensor())), dropout, /*train=*/dropout > 0);
    return Batch::tuple({left(hidden), right(hidden)});
  }
  double dropout;
  nn::Linear trunk{nullptr}, left{nullptr}, right{nullptr};
  at::Tensor forwards;
  int64_t calls = 0;
};

/// Contrastive, with a temperature of its own.
at::Tensor info_nce(const at::Tensor& a, const at::Tensor& b, const at::Tensor& log_scale) {
  const auto unit = [](const at::Tensor& x) { return x / x.norm(2, 1, /*keepdim=*/true); };
  const at::Tensor logits = at::matmul(unit(a), unit(b).t()) * log_scale.exp();
  const at::Tensor labels = at::arange(a.size(0), at::kLong);
  return at::cross_entropy_loss(logits, labels) + at::cross_entropy_loss(logits.t(), labels);
}

struct Contrast {
  explicit Contrast(int64_t samples, double dropout = 0)
      : net(std::make_shared<Towers>(dropout)),
        log_scale(at::full({}, 1.3, at::kDouble).requires_grad_()),
        inputs(at::randn({samples, 5}, at::kDouble)) {}

  CoupledLoss loss() const {
    const at::Tensor scale = log_scale;
    return losses::coupled([scale](const Batch& outputs, const Batch& /*targets*/) {
      return info_nce(outputs.tensors()[0], outputs.tensors()[1], scale);
    });
  }
  std::vector<at::Tensor> leaves() const {
    std::vector<at::Tensor> all = net->parameters();
    all.push_back(log_scale);
    return all;
  }
  std::vector<at::Tensor> take_gradients() const {
    std::vector<at::Tensor> gradients;
    for (at::Tensor& leaf : leaves()) {
      gradients.push_back(leaf.grad());
      leaf.mutable_grad().reset();
    }
    return gradients;
  }
  StepReport step(int64_t size, int64_t retained) {
    Options options = of_size(size);
    options.retained_micro_batches = retained;
    net->calls = 0;
    return VirtualBatch(net, loss(), options).backward(Batch(inputs), Batch());
  }

  std::shared_ptr<Towers> net;
  at::Tensor log_scale, inputs;
};

TEST(CoupledLoss, GradientsAreThoseOfTheWholeBatchHoweverManyGraphsAreKept) {
  struct Case {
    int64_t samples, size;
  };
  // No size is that of an output's other dimension, 4, for then a forward more would have to tell.
  for (const Case& sizes : {Case{6, 1}, Case{15, 5}, Case{7, 3}, Case{5, 9}}) {
    at::manual_seed(3);
    Contrast task(sizes.samples);
    const std::vector<at::Tensor> native = task.net->forward(Batch(task.inputs)).tensors();
    const at::Tensor loss = info_nce(native[0], native[1], task.log_scale);
    const auto expected = torch::autograd::grad({loss}, task.leaves());
    const int64_t count = (sizes.samples + sizes.size - 1) / sizes.size;
    std::vector<at::Tensor> first;
    for (const int64_t retained : {int64_t{0}, int64_t{1}, count, int64_t{99}}) {
      SCOPED_TRACE(std::to_string(sizes.samples) + " by " + std::to_string(sizes.size) + ", " +
                   std::to_string(retained) + " retained");
      task.net->forwards.zero_();
      const StepReport report = task.step(sizes.size, retained);
      EXPECT_EQ(report.strategy, "replay");
      EXPECT_EQ(report.micro_batch_sizes, split_by(sizes.samples, sizes.size));
      // Micro-batches of one length leave equal buffers even where these count samples: another
      // number of rows is asked. And where there are several, rows of all are compared with those
      // of three of them, or with each of up to 16 samples.
      const int64_t looks = count > 1 ? 1 + (sizes.size == 1 ? sizes.samples : 3) : 0;
      const int64_t asks = count > 1 && sizes.samples % sizes.size == 0 ? 1 : 0;
      EXPECT_EQ(task.net->calls, count + asks + looks);
      EXPECT_EQ(task.net->forwards.item<int64_t>(), 1);
      EXPECT_LE(error(report.loss, loss), 1e-13);
      const std::vector<at::Tensor> found = task.take_gradients();
      for (size_t i = 0; i < found.size(); ++i) EXPECT_LE(error(found[i], expected[i]), 1e-12);
      if (first.empty()) first = found;
      for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(at::equal(found[i], first[i]));
    }
  }
}

// The loss at the same seed, a little to both sides along the gradient.
TEST(CoupledLoss, GradientsBelongToTheMasksThatTheLossSaw) {
  for (const int64_t retained : {0, 1, 3}) {
    at::manual_seed(3);
    Contrast task(11, /*dropout=*/0.4);
    const auto step = [&] {
      at::manual_seed(5);
      return task.step(4, retained).loss.item<double>();
    };
    step();
    const std::vector<at::Tensor> gradients = task.take_gradients();
    double squares = 0;
    for (const at::Tensor& gradient : gradients) squares += gradient.square().sum().item<double>();
    const double distance = 1e-6 / std::sqrt(squares);
    const auto moved = [&](double by) {
      const at::NoGradGuard no_grad;
      const std::vector<at::Tensor> leaves = task.leaves();
      for (size_t i = 0; i < leaves.size(); ++i) leaves[i].add_(gradients[i], by);
      double loss = 0;
      {
        const at::AutoGradMode grad(true);
        loss = step();
      }
      task.take_gradients();
      for (size_t i = 0; i < leaves.size(); ++i) leaves[i].add_(gradients[i], -by);
      return loss;
    };
    const double slope = (moved(distance) - moved(-distance)) / (2 * distance);
    EXPECT_NEAR(slope / squares, 1, 1e-6) << retained << " retained";
  }
}

TEST(CoupledLoss, RandomStateEndsAlikeHoweverManyGraphsAreKept) {
  Contrast task(11, /*dropout=*/0.4);
  std::vector<at::Tensor> ends;
  for (const int64_t retained : {0, 1, 3}) {
    at::manual_seed(5);
    task.step(4, retained);
    ends.push_back(at::randn({4}));
  }
  EXPECT_TRUE(at::equal(ends[0], ends[1]));
  EXPECT_TRUE(at::equal(ends[0], ends[2]));
}

TEST(CoupledLoss, TargetsAndOutputsComeInTheOrderOfTheBatch) {
  const at::Tensor gain = at::full({}, 1.5, at::kDouble).requires_grad_();
  const auto model =
      make_model([gain](const Batch& inputs) { return Batch(inputs.tensor() * gain); }, {gain});
  const at::Tensor inputs = at::arange(1, 8, at::kDouble);
  const at::Tensor targets = at::arange(7, at::kLong);
  const CoupledLoss loss = losses::coupled([&](const Batch& outputs, const Batch& given) {
    EXPECT_TRUE(at::equal(given.tensor(), targets));
    return (outputs.tensor() * given.tensor()).sum().square();
  });
  const double weighted = (inputs * targets).sum().item<double>();
  for (const int64_t retained : {0, 2, 99}) {
    gain.mutable_grad().reset();
    Options options = of_size(2);
    options.retained_micro_batches = retained;
    VirtualBatch(model, loss, options).backward(inputs, targets);
    EXPECT_NEAR(gain.grad().item<double>(), 2 * 1.5 * weighted * weighted, 1e-9);
  }
}

TEST(CoupledLoss, ABudgetIsKeptAndPredicted) {
  at::manual_seed(3);
  Contrast task(64);
  task.net = std::make_shared<Towers>(0.1);
  Options options;
  options.memory_budget = memory::stats(at::kCPU).live + 300'000;
  VirtualBatch batch(task.net, task.loss(), options);
  StepReport report;
  for (int step = 0; step < 40 && !report.predicted_peak_bytes; ++step) {
    task.take_gradients();
    report = batch.backward(Batch(task.inputs), Batch());
    EXPECT_LE(report.peak_bytes, *report.memory_budget);
  }
  ASSERT_TRUE(report.predicted_peak_bytes.has_value());
  const double ratio =
      static_cast<double>(*report.predicted_peak_bytes) / static_cast<double>(report.peak_bytes);
  EXPECT_GE(ratio, 0.99);
  // The whole batch as one micro-batch takes up to an activation less than was predicted.
  EXPECT_LE(ratio, report.micro_batch_sizes.size() > 1 ? 1.01 : 1.15);
}

TEST(CoupledLoss, RefusesWhatIsNoLoss) {
  Contrast task(6);
  const auto run = [&](CoupledLoss::Value value) {
    VirtualBatch(task.net, losses::coupled(std::move(value)), of_size(2))
        .backward(Batch(task.inputs), Batch());
  };
  EXPECT_THROW(run([](const Batch& outputs, const Batch&) { return outputs.tensors()[0].sum(1); }),
               InvalidArgument);
  EXPECT_THROW(
      run([](const Batch& outputs, const Batch&) { return outputs.tensors()[0].detach().sum(); }),
      InvalidArgument);
  EXPECT_THROW(losses::coupled(nullptr), InvalidArgument);
  for (const at::Tensor& gradient : task.take_gradients()) EXPECT_FALSE(gradient.defined());
  EXPECT_EQ(task.net->forwards.item<int64_t>(), 0);
}

}  // namespace
}  // namespace infinitybatch::testing
