// What the caller may ask of a step, and what a step refuses.
#include "step/support.hpp"

#include "step/options.hpp"

#include <c10/core/InferenceMode.h>

#include <set>
#include <string>

namespace infinitybatch::testing {
namespace {

TEST(Options, EachIsVisitedOnceInItsOrder) {
  const Options options;
  const void* last = nullptr;
  std::set<std::string> names;
  for_each_option(options, [&](const char* name, const auto& value) {
    EXPECT_LT(last, static_cast<const void*>(&value)) << name;
    last = &value;
    EXPECT_TRUE(names.insert(name).second) << name;
  });
  EXPECT_EQ(names.size(), 16U);
}

TEST(Step, TheDocumentedCallWorks) {
  Task task;
  const auto expected = task.native_gradients();
  VirtualBatch batch(task.net, losses::mse(), of_size(3));
  const StepReport report = batch.backward(task.inputs, task.targets);
  expect_gradients(*task.net, expected);
  EXPECT_LE(error(report.loss, task.native_loss()), 1e-12);
  EXPECT_EQ(report.micro_batch_sizes, (std::vector<int64_t>{3, 3, 1}));
  EXPECT_FALSE(report.outputs.has_value());
  EXPECT_FALSE(report.memory_budget.has_value());
  EXPECT_GT(report.peak_bytes, 0);
  EXPECT_GT(report.seconds, 0);
}

// Targets too large to be read at once: their denominator is added up piece by piece, the part that
// shapes decide (elements) as well as the part that values decide (weights, ignored labels).
TEST(Step, TheDenominatorOfLargeTargetsIsSummedOverPieces) {
  constexpr int64_t kPlaces = 200'000;
  const at::Tensor gain = at::full({}, 1.5, at::kDouble).requires_grad_();
  const auto model =
      make_model([gain](const Batch& inputs) { return Batch(inputs.tensor() * gain); }, {gain});
  const at::Tensor outputs = at::randn({3, 2, kPlaces}, at::kDouble);
  const auto check = [&](const SeparableLoss& loss, const at::Tensor& native,
                         const at::Tensor& targets) {
    const at::Tensor expected = torch::autograd::grad({native}, {gain})[0];
    gain.mutable_grad().reset();
    const StepReport report = VirtualBatch(model, loss, of_size(2)).backward(outputs, targets);
    EXPECT_LE(error(report.loss, native), 1e-12);
    EXPECT_LE(error(gain.grad(), expected), 1e-12);
  };
  const at::Tensor numbers = at::randn({3, 2, kPlaces}, at::kDouble);
  check(losses::mse(), at::mse_loss(outputs * gain, numbers), numbers);
  at::Tensor labels = at::randint(2, {3, kPlaces}, at::kLong);
  labels.select(0, 1).slice(0, 0, kPlaces / 2).fill_(-100);
  const at::Tensor weight = at::tensor({0.3, 1.7}, at::kDouble);
  check(losses::cross_entropy({weight, -100, 0.0, Reduction::mean}),
        at::cross_entropy_loss(outputs * gain, labels, weight), labels);
}

TEST(Step, APenaltyCountsOnceHoweverManyMicroBatches) {
  for (const int64_t size : {1, 3, 7}) {
    Task task;
    const at::Tensor weight = task.net->parameters()[0];
    const at::Tensor loss = task.native_loss() + 0.1 * weight.square().sum();
    const auto expected = torch::autograd::grad({loss}, task.net->parameters());
    VirtualBatch batch(task.net,
                       losses::mse().with_penalty([&] { return 0.1 * weight.square().sum(); }),
                       of_size(size));
    const StepReport report = batch.backward(task.inputs, task.targets);
    expect_gradients(*task.net, expected);
    EXPECT_LE(error(report.loss, loss), 1e-12);
  }
}

TEST(Step, KeepsOutputsInTheirOrderAndDetached) {
  Task task;
  Options options = of_size(3);
  options.keep_outputs = true;
  const StepReport report =
      VirtualBatch(task.net, losses::mse(), options).backward(task.inputs, task.targets);
  ASSERT_TRUE(report.outputs.has_value());
  EXPECT_FALSE(report.outputs->tensor().requires_grad());
  EXPECT_LE(error(report.outputs->tensor(), task.net->forward(task.inputs)), 1e-12);
}

/// Two outputs under names, each with its own part of the loss.
struct TwoHeads : nn::Module {
  TwoHeads() {
    trunk = register_module("trunk", nn::Linear(4, 6));
    score = register_module("score", nn::Linear(6, 2));
    aux = register_module("aux", nn::Linear(6, 3));
    to(at::kDouble);
  }
  Batch forward(const Batch& inputs) {
    const at::Tensor hidden = trunk(inputs.tensor()).tanh();
    return Batch::dict({{"score", score(hidden)}, {"aux", aux(hidden)}});
  }
  nn::Linear trunk = nullptr, score = nullptr, aux = nullptr;
};

TEST(Step, TakesAndKeepsOutputsUnderNames) {
  Task task;
  const auto net = std::make_shared<TwoHeads>();
  const auto sum = [](const Batch& outputs, const Batch& targets) {
    return (outputs["score"].tensor() - targets.tensor()).square().sum() +
           outputs["aux"].tensor().abs().sum();
  };
  const at::Tensor native = sum(net->forward(task.inputs), Batch(task.targets)) / 7;
  const auto expected = torch::autograd::grad({native}, net->parameters());
  Options options = of_size(2);
  options.keep_outputs = true;
  const StepReport report =
      VirtualBatch(net,
                   losses::separable(sum,
                                     [](const Batch&, int64_t samples) -> DenominatorPart {
                                       return static_cast<double>(samples);
                                     }),
                   options)
          .backward(task.inputs, task.targets);
  expect_gradients(*net, expected);
  EXPECT_EQ((*report.outputs)["aux"].tensor().sizes(), (std::vector<int64_t>{7, 3}));
}

TEST(Step, ShowsEachMicroBatchOnceDetached) {
  Task task;
  Options options = of_size(3);
  std::vector<std::pair<int64_t, int64_t>> rows;
  options.on_micro_batch = [&](const MicroBatch& seen) {
    rows.emplace_back(seen.begin, seen.end);
    EXPECT_FALSE(seen.outputs.tensor().requires_grad());
    EXPECT_TRUE(seen.targets.tensor().equal(task.targets.slice(0, seen.begin, seen.end)));
    EXPECT_EQ(seen.outputs.tensor().size(0), seen.end - seen.begin);
  };
  VirtualBatch(task.net, losses::mse(), options).backward(task.inputs, task.targets);
  EXPECT_EQ(rows, (std::vector<std::pair<int64_t, int64_t>>{{0, 3}, {3, 6}, {6, 7}}));
}

TEST(Step, ALossScaleScalesGradientsNotTheReportedLoss) {
  Task task;
  auto expected = task.native_gradients();
  for (at::Tensor& gradient : expected) gradient = gradient * 128;
  Options options = of_size(2);
  int asked = 0;
  options.loss_scale = [&] {
    ++asked;
    return at::full({}, 128.0);
  };
  const StepReport report =
      VirtualBatch(task.net, losses::mse(), options).backward(task.inputs, task.targets);
  expect_gradients(*task.net, expected);
  EXPECT_LE(error(report.loss, task.native_loss()), 1e-12);
  EXPECT_EQ(asked, 1);
}

TEST(Step, MayBeInterruptedBetweenMicroBatches) {
  Task task;
  Options options = of_size(2);
  int left = 2;
  options.interrupt = [&] {
    if (left-- == 0) throw std::runtime_error("Ctrl-C");
  };
  VirtualBatch batch(task.net, losses::mse(), options);
  EXPECT_THROW(batch.backward(task.inputs, task.targets), std::runtime_error);
  for (const at::Tensor& parameter : task.net->parameters()) {
    EXPECT_FALSE(parameter.grad().defined());
  }
  left = 100;
  batch.backward(task.inputs, task.targets);
  expect_gradients(*task.net, task.native_gradients());
}

TEST(Step, ASourceIsAskedForSlicesOnly) {
  Task task;
  int64_t largest = 0;
  const auto make = [&](const at::Tensor& all) {
    return BatchSource{7,
                       [&largest, all](int64_t begin, int64_t end) {
                         largest = std::max(largest, end - begin);
                         return Batch(all.slice(0, begin, end).clone());
                       },
                       ""};
  };
  VirtualBatch(task.net, losses::mse(), of_size(2)).backward(make(task.inputs), make(task.targets));
  expect_gradients(*task.net, task.native_gradients());
  // Targets may be read in larger pieces for the denominator, inputs never: see the next test.
  largest = 0;
  const BatchSource targets = BatchSource::from(Batch(task.targets), "targets");
  VirtualBatch(task.net, losses::mse(), of_size(2)).backward(make(task.inputs), targets);
  EXPECT_EQ(largest, 2);
}

// A logical batch that would not fit in the budget as a tensor.
TEST(Step, ABatchThatNeverExistsAsOneTensorStaysInsideABudget) {
  auto net = nn::Linear(256, 2);
  constexpr int64_t kSamples = 8192;  // 8 MiB of inputs
  const BatchSource inputs{kSamples,
                           [](int64_t begin, int64_t end) {
                             const at::Tensor rows = at::arange(begin, end).to(at::kFloat);
                             return Batch(at::cos(rows.unsqueeze(1) * at::arange(256) * 0.01));
                           },
                           "cosines"};
  const BatchSource targets{
      kSamples, [](int64_t begin, int64_t end) { return Batch(at::zeros({end - begin, 2})); },
      "zeros"};
  Options options;
  options.memory_budget = memory::stats(at::kCPU).live + (int64_t{2} << 20);
  VirtualBatch batch(net, losses::mse(), options);
  for (int step = 0; step < 2; ++step) {
    net->zero_grad();
    const StepReport report = batch.backward(inputs, targets);
    EXPECT_LE(report.peak_bytes, *report.memory_budget);
  }
  const at::Tensor gradient = net->weight.grad().clone();
  const at::Tensor all = inputs.rows(0, kSamples).tensor();
  net->zero_grad();
  at::mse_loss(net(all), at::zeros({kSamples, 2})).backward();
  EXPECT_LE(error(gradient, net->weight.grad()), 1e-5);
}

class AnyN : public ::testing::TestWithParam<int64_t> {};

TEST_P(AnyN, IsExactForEveryMicroBatchSizeAndWithABudget) {
  for (int64_t size = 0; size <= GetParam() + 1; ++size) {
    Task task(GetParam());
    Options options;
    if (size > 0) {
      options.micro_batch_size = size;
    } else {
      options.memory_budget = "64MiB";
    }
    VirtualBatch batch(task.net, losses::mse(), options);
    for (int step = 0; step < 3; ++step) {
      task.net->zero_grad();
      batch.backward(task.inputs, task.targets);
      expect_gradients(*task.net, task.native_gradients());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Step, AnyN, ::testing::Values(1, 2, 3, 4, 5, 6, 7, 11),
                         ::testing::PrintToStringParamName());

TEST(Step, TheSameSeedAndPlanGiveTheSameBits) {
  const auto run = [] {
    torch::manual_seed(21);
    auto net = nn::Sequential(nn::Linear(4, 9), nn::Dropout(0.5), nn::ReLU(), nn::Linear(9, 2));
    const at::Tensor inputs = at::randn({10, 4}), targets = at::randn({10, 2});
    VirtualBatch batch(net, losses::mse(), of_size(4));
    std::vector<at::Tensor> results{batch.backward(inputs, targets).loss};
    for (const at::Tensor& parameter : net->parameters()) results.push_back(parameter.grad());
    return results;
  };
  const auto first = run(), second = run();
  for (size_t i = 0; i < first.size(); ++i) EXPECT_TRUE(first[i].equal(second[i])) << i;
}

TEST(Step, FollowsTrainAndEval) {
  torch::manual_seed(4);
  auto net = nn::Sequential(nn::Linear(4, 64), nn::Dropout(0.5), nn::Linear(64, 2));
  const at::Tensor inputs = at::randn({6, 4}), targets = at::randn({6, 2});
  Options options;
  options.memory_budget = "64MiB";
  VirtualBatch batch(net, losses::mse(), options);
  net->eval();
  batch.backward(inputs, targets);
  const at::Tensor eval = net->parameters()[0].grad().clone();
  net->zero_grad();
  at::mse_loss(net->forward(inputs), targets).backward();
  EXPECT_LE(error(eval, net->parameters()[0].grad()), 1e-5);
  net->train();
  net->zero_grad();
  batch.backward(inputs, targets);
  EXPECT_GT(error(net->parameters()[0].grad(), eval), 1e-2) << "dropout was on";
}

TEST(Step, ParametersMayBeRebuiltBetweenSteps) {
  Task task;
  VirtualBatch batch(task.net, losses::mse(), of_size(2));
  batch.backward(task.inputs, task.targets);
  auto last = std::dynamic_pointer_cast<nn::LinearImpl>(task.net->children().back());
  last->weight = last->register_parameter("fresh", at::randn({2, 5}, at::kDouble));
  task.net->zero_grad();
  batch.backward(task.inputs, task.targets);
  const auto expected =
      torch::autograd::grad({task.native_loss()}, {task.net->parameters()[0], last->weight});
  EXPECT_LE(error(task.net->parameters()[0].grad(), expected[0]), 1e-12);
  EXPECT_LE(error(last->weight.grad(), expected[1]), 1e-12);
}

TEST(Step, RefusesToRunWithoutGradients) {
  Task task;
  VirtualBatch batch(task.net, losses::mse(), of_size(2));
  {
    const at::NoGradGuard no_grad;
    expect_says(message_of<StateError>([&] { batch.backward(task.inputs, task.targets); }),
                "no_grad");
  }
  {
    const c10::InferenceMode inference;
    expect_says(message_of<StateError>([&] { batch.backward(task.inputs, task.targets); }),
                "inference_mode");
  }
  batch.backward(task.inputs, task.targets);
  expect_gradients(*task.net, task.native_gradients());
}

TEST(Step, RefusesInferenceTensorsAmongParameters) {
  nn::Linear net = nullptr;
  {
    const c10::InferenceMode inference;
    net = nn::Linear(2, 2);
  }
  VirtualBatch batch(net, losses::mse(), of_size(2));
  expect_says(message_of<Unsupported>([&] { batch.backward(at::ones({4, 2}), at::ones({4, 2})); }),
              "weight");
}

TEST(Step, RefusesBatchesThatCannotBeSplitAlike) {
  Task task;
  VirtualBatch batch(task.net, losses::mse(), of_size(2));
  const auto message =
      message_of<BatchError>([&] { batch.backward(task.inputs, task.targets.slice(0, 0, 5)); });
  expect_says(message, "7");
  expect_says(message, "5");
  EXPECT_THROW(batch.backward(at::ones({0, 4}), at::ones({0, 2})), BatchError);
  EXPECT_THROW(batch.backward(at::ones({}), at::ones({})), BatchError);
}

TEST(Step, RefusesSizesBelowOne) {
  Task task;
  for (const int64_t size : {0, -3}) {
    expect_says(
        message_of<InvalidArgument>([&] { VirtualBatch(task.net, losses::mse(), of_size(size)); }),
        std::to_string(size));
  }
}

TEST(Step, RefusesALossThatDependsOnNoParameter) {
  Task task;
  for (at::Tensor& parameter : task.net->parameters()) parameter.set_requires_grad(false);
  VirtualBatch batch(task.net, losses::mse(), of_size(2));
  EXPECT_THROW(batch.backward(task.inputs, task.targets), InvalidArgument);
}

// One step inside another on the same parameters would share the gradients' way.
TEST(Step, RefusesAStepInsideAStepOnTheSameParameters) {
  Task task;
  VirtualBatch inner(task.net, losses::mse(), of_size(2));
  Options options = of_size(2);
  options.on_micro_batch = [&](const MicroBatch&) { inner.backward(task.inputs, task.targets); };
  VirtualBatch outer(task.net, losses::mse(), options);
  EXPECT_THROW(outer.backward(task.inputs, task.targets), StateError);
  task.net->zero_grad();
  inner.backward(task.inputs, task.targets);
  expect_gradients(*task.net, task.native_gradients());
}

TEST(Step, TwoModelsMayStepInTwoThreads) {
  std::vector<Task> tasks(2);
  std::vector<std::thread> threads;
  for (Task& task : tasks) {
    threads.emplace_back([&task] {
      VirtualBatch batch(task.net, losses::mse(), of_size(2));
      for (int i = 0; i < 20; ++i) {
        task.net->zero_grad();
        batch.backward(task.inputs, task.targets);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (Task& task : tasks) expect_gradients(*task.net, task.native_gradients());
}

}  // namespace
}  // namespace infinitybatch::testing
