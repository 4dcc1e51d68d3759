// Gradients arrive in `.grad` once, as after one native backward.
#include "step/support.hpp"

#include <torch/csrc/autograd/functions/accumulate_grad.h>

namespace infinitybatch::testing {
namespace {

TEST(HandOut, TensorHooksFireOnceOnTheFullGradient) {
  Task task;
  const auto expected = task.native_gradients();
  const auto parameters = task.net->parameters();
  std::vector<at::Tensor> seen;
  parameters[0].register_hook(
      [&](const at::Tensor& gradient) { seen.push_back(gradient.clone()); });
  parameters[2].register_hook([](const at::Tensor& gradient) { return gradient * 2; });
  VirtualBatch(task.net, losses::mse(), of_size(2)).backward(task.inputs, task.targets);
  ASSERT_EQ(seen.size(), 1u);
  EXPECT_LE(error(seen[0], expected[0]), 1e-12);
  expect_gradients(*task.net, {expected[0], expected[1], expected[2] * 2, expected[3]});
}

struct CountingPostHook : torch::autograd::FunctionPostHook {
  CountingPostHook(int& calls, at::Tensor& gradient) : calls(calls), gradient(gradient) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& inputs) override {
    ++calls;
    gradient = inputs[0].clone();
    return outputs;
  }
  int& calls;
  at::Tensor& gradient;
};

struct AfterAccumulation : torch::autograd::PostAccumulateGradHook {
  explicit AfterAccumulation(std::vector<at::Tensor>& seen) : seen(seen) {}
  void operator()(const torch::autograd::Variable& variable) override {
    seen.push_back(variable.grad().clone());
  }
  std::vector<at::Tensor>& seen;
};

// DDP hangs on the accumulator's post hook, optimizers in backward on the post accumulate hook.
TEST(HandOut, AccumulatorHooksFireOnceOnTheFullGradient) {
  Task task;
  const auto expected = task.native_gradients();
  const auto parameters = task.net->parameters();
  int calls = 0;
  at::Tensor gradient;
  const auto accumulator = torch::autograd::impl::grad_accumulator(parameters[0]);
  accumulator->add_post_hook(std::make_unique<CountingPostHook>(calls, gradient));
  std::vector<at::Tensor> seen;
  torch::autograd::impl::set_post_acc_grad_hooks(parameters[1],
                                                 std::make_unique<AfterAccumulation>(seen));
  VirtualBatch batch(task.net, losses::mse(), of_size(3));
  for (int step = 1; step <= 2; ++step) {
    batch.backward(task.inputs, task.targets);
    EXPECT_EQ(calls, step);
    EXPECT_LE(error(gradient, expected[0]), 1e-12);
    ASSERT_EQ(seen.size(), static_cast<size_t>(step));
    EXPECT_LE(error(seen.back(), expected[1] * step), 1e-12);
  }
  // The accumulator is the same one as before, for whoever holds it.
  EXPECT_TRUE(torch::autograd::impl::grad_accumulator(parameters[0]).get() == accumulator.get());
}

TEST(HandOut, AddsToTheGradientThatIsThereInTheSameTensor) {
  Task task;
  const auto expected = task.native_gradients();
  std::vector<at::Tensor> before, sums;
  for (size_t i = 0; i < expected.size(); ++i) {
    at::Tensor parameter = task.net->parameters()[i];
    parameter.mutable_grad() = at::full_like(parameter, 0.5).detach();
    before.push_back(parameter.grad());
    sums.push_back(expected[i] + 0.5);
  }
  VirtualBatch(task.net, losses::mse(), of_size(2)).backward(task.inputs, task.targets);
  expect_gradients(*task.net, sums);
  for (size_t i = 0; i < before.size(); ++i) {
    EXPECT_TRUE(task.net->parameters()[i].grad().is_same(before[i]));
  }
}

TEST(HandOut, ZeroGradWorksBothWaysBetweenSteps) {
  Task task;
  const auto expected = task.native_gradients();
  VirtualBatch batch(task.net, losses::mse(), of_size(4));
  batch.backward(task.inputs, task.targets);
  task.net->zero_grad(/*set_to_none=*/false);
  const at::Tensor kept = task.net->parameters()[0].grad();
  EXPECT_TRUE(kept.equal(at::zeros_like(kept)));
  batch.backward(task.inputs, task.targets);
  expect_gradients(*task.net, expected);
  EXPECT_TRUE(task.net->parameters()[0].grad().is_same(kept));
  task.net->zero_grad(/*set_to_none=*/true);
  batch.backward(task.inputs, task.targets);
  expect_gradients(*task.net, expected);
  EXPECT_FALSE(task.net->parameters()[0].grad().is_same(kept));
}

// A gradient that the user kept from the last step must not change under their hands.
TEST(HandOut, DoesNotReuseAGradientThatTheUserKept) {
  Task task;
  VirtualBatch batch(task.net, losses::mse(), of_size(2));
  batch.backward(task.inputs, task.targets);
  const at::Tensor kept = task.net->parameters()[0].grad();
  const at::Tensor values = kept.clone();
  task.net->zero_grad();
  batch.backward(task.inputs * 2, task.targets);
  EXPECT_TRUE(kept.equal(values));
}

struct Partly : nn::Module {
  Partly() {
    used = register_module("used", nn::Linear(3, 2));
    unused = register_module("unused", nn::Linear(3, 2));
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) { return used(x); }
  nn::Linear used = nullptr, unused = nullptr;
};

TEST(HandOut, AnUnusedParameterKeepsWhatItHas) {
  const auto net = std::make_shared<Partly>();
  net->unused->bias.mutable_grad() = at::ones({2}, at::kDouble);
  VirtualBatch(net, losses::mse(), of_size(2))
      .backward(at::randn({5, 3}, at::kDouble), at::randn({5, 2}, at::kDouble));
  EXPECT_TRUE(net->used->weight.grad().defined());
  EXPECT_FALSE(net->unused->weight.grad().defined());
  EXPECT_TRUE(net->unused->bias.grad().equal(at::ones({2}, at::kDouble)));
}

// A tensor that the module does not list, used in forward and in the loss.
TEST(HandOut, LeavesThatTheModuleDoesNotListGetTheirGradient) {
  Task task;
  const at::Tensor gain = at::full({2}, 1.5, at::kDouble).requires_grad_();
  const at::Tensor temperature = at::full({}, 0.7, at::kDouble).requires_grad_();
  auto net = task.net;
  const auto forward = [net, gain](const Batch& inputs) mutable {
    return Batch(net->forward(inputs.tensor()) * gain);
  };
  const auto loss = losses::separable(
      [&](const Batch& outputs, const Batch& targets) {
        return (outputs.tensor() / temperature - targets.tensor()).square().sum();
      },
      [](const Batch&, int64_t samples) -> DenominatorPart { return 2.0 * samples; });
  const auto native = [&] {
    return at::mse_loss(net->forward(task.inputs) * gain / temperature, task.targets);
  };
  auto leaves = net->parameters();
  leaves.push_back(gain);
  leaves.push_back(temperature);
  const auto expected = torch::autograd::grad({native()}, leaves);
  int during = 0;
  Options options = of_size(2);
  options.on_micro_batch = [&](const MicroBatch&) {
    if (gain.grad().defined() || temperature.grad().defined()) ++during;
  };
  gain.register_hook(
      [&](const at::Tensor& gradient) { EXPECT_LE(error(gradient, expected[4]), 1e-12); });
  VirtualBatch(make_model(forward, net->parameters()), loss, options)
      .backward(task.inputs, task.targets);
  EXPECT_EQ(during, 0) << "it must wait for the hand-out";
  for (size_t i = 0; i < leaves.size(); ++i) {
    EXPECT_LE(error(leaves[i].grad(), expected[i]), 1e-12) << i;
  }
}

TEST(HandOut, AnInputThatRequiresGradGetsItsOwn) {
  Task task;
  task.inputs.requires_grad_();
  const at::Tensor expected = torch::autograd::grad({task.native_loss()}, {task.inputs})[0];
  VirtualBatch(task.net, losses::mse(), of_size(3)).backward(task.inputs, task.targets);
  EXPECT_LE(error(task.inputs.grad(), expected), 1e-12);
}

TEST(HandOut, BackwardThroughKeptOutputsIsRefused) {
  Task task;
  at::Tensor kept;
  auto net = task.net;
  const auto forward = [net, &kept](const Batch& inputs) mutable {
    kept = net->forward(inputs.tensor());
    return Batch(kept);
  };
  VirtualBatch(make_model(forward, net->parameters()), losses::mse(), of_size(7))
      .backward(task.inputs, task.targets);
  EXPECT_ANY_THROW(kept.sum().backward());
  expect_gradients(*net, task.native_gradients());
}

// Half precision parameters: 64 equal gradients summed in half precision would stop growing.
class HalfParameters : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(HalfParameters, AreSummedInFloat32) {
  constexpr int64_t kSamples = 4096;
  auto net = nn::Linear(nn::LinearOptions(1, 1).bias(false));
  net->to(GetParam());
  const at::Tensor inputs = at::full({kSamples, 1}, 1.0).to(GetParam());
  const auto loss = losses::separable(
      [](const Batch& outputs, const Batch&) { return outputs.tensor().to(at::kFloat).sum(); },
      [](const Batch&, int64_t samples) -> DenominatorPart { return double(samples); });
  VirtualBatch(net, loss, of_size(1)).backward(inputs, inputs);
  EXPECT_EQ(net->weight.grad().scalar_type(), GetParam());
  // Each sample adds 1/4096; one by one in half precision the sum stalls far below 1.
  EXPECT_NEAR(net->weight.grad().to(at::kDouble).item<double>(), 1.0, 1e-3);
}

TEST_P(HalfParameters, AreAsGoodAsNative) {
  torch::manual_seed(9);
  auto net = nn::Sequential(nn::Linear(6, 16), nn::Tanh(), nn::Linear(16, 3));
  net->to(GetParam());
  auto exact = std::dynamic_pointer_cast<nn::SequentialImpl>(net->clone());
  exact->to(at::kDouble);
  const at::Tensor inputs = at::randn({48, 6}).to(GetParam());
  const at::Tensor targets = at::randn({48, 3}).to(GetParam());
  at::mse_loss(exact->forward(inputs.to(at::kDouble)), targets.to(at::kDouble)).backward();
  at::mse_loss(net->forward(inputs), targets).backward();
  std::vector<double> natives;
  for (size_t i = 0; i < net->parameters().size(); ++i) {
    natives.push_back(error(net->parameters()[i].grad(), exact->parameters()[i].grad()));
  }
  net->zero_grad();
  VirtualBatch(net, losses::mse(), of_size(5)).backward(inputs, targets);
  const double epsilon = GetParam() == at::kHalf ? 0x1p-10 : 0x1p-7;
  for (size_t i = 0; i < natives.size(); ++i) {
    EXPECT_LE(error(net->parameters()[i].grad(), exact->parameters()[i].grad()),
              std::max(2 * natives[i], 8 * epsilon));
  }
}

INSTANTIATE_TEST_SUITE_P(HandOut, HalfParameters, ::testing::Values(at::kBFloat16, at::kHalf),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

}  // namespace
}  // namespace infinitybatch::testing
