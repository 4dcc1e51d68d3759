// bench: every strategy that applies is timed, nothing else changes.
#include "step/support.hpp"

#include <algorithm>
#include <map>

namespace infinitybatch::testing {
namespace {

const CoupledLoss kSpread = losses::coupled([](const Batch& outputs, const Batch& targets) {
  const at::Tensor distance = outputs.tensor() - targets.tensor();
  return (distance - distance.mean(0)).square().sum();
});

std::map<std::string, StrategyTimes> by_name(const BenchReport& report) {
  std::map<std::string, StrategyTimes> strategies;
  for (const StrategyTimes& times : report.strategies) strategies[times.name] = times;
  return strategies;
}

BenchOptions short_run() {
  return {/*rounds=*/3, /*seconds=*/60};
}

TEST(Bench, ASeparableLossIsStreamedAndComputedInTwoPasses) {
  Task task;
  const BenchReport report = bench(task.net, losses::mse(), Batch(task.inputs), Batch(task.targets),
                                   of_size(2), short_run());
  EXPECT_EQ(report.batch_size, 7);
  EXPECT_EQ(report.rounds, 3);
  EXPECT_EQ(report.reference, "native");
  const auto strategies = by_name(report);
  ASSERT_EQ(strategies.size(), 6u) << report.explain();
  for (const auto& [name, times] : strategies) {
    EXPECT_TRUE(times.timed()) << name << ": " << times.why_not;
    EXPECT_EQ(times.cpu_seconds.size(), 3u);
    EXPECT_EQ(times.wall_seconds.size(), 3u);
    EXPECT_GT(*std::min_element(times.wall_seconds.begin(), times.wall_seconds.end()), 0);
    EXPECT_LE(times.cpu.lower, times.cpu.median);
    EXPECT_LE(times.cpu.median, times.cpu.upper);
    EXPECT_GT(times.peak_bytes, report.live_bytes);
    if (name != "native") {
      EXPECT_EQ(times.micro_batch_sizes, (std::vector<int64_t>{2, 2, 2, 1})) << name;
    }
    expect_says(report.explain(), name);
  }
  EXPECT_EQ(strategies.at("native").cpu.median, 1);
  EXPECT_EQ(strategies.at("native").micro_batch_sizes, std::vector<int64_t>{7});
  EXPECT_EQ(strategies.at("stream").strategy, "stream");
  EXPECT_EQ(strategies.at("retain-none").strategy, "replay");
  EXPECT_EQ(strategies.at("rerun").strategy, "rerun");
}

TEST(Bench, ACoupledLossIsPlannedWhereNoSizeIsGiven) {
  Task task(64);
  Options options;
  options.memory_budget = "64MiB";
  const BenchReport report =
      bench(task.net, kSpread, Batch(task.inputs), Batch(task.targets), options, short_run());
  const auto strategies = by_name(report);
  EXPECT_EQ(strategies.count("stream"), 0u);
  ASSERT_EQ(strategies.count("planned"), 1u);
  EXPECT_EQ(strategies.at("planned").strategy, "replay");
  EXPECT_EQ(report.memory_budget, int64_t{64} << 20);
}

TEST(Bench, RetainedGraphsAreSeenInThePeaks) {
  Task task(2000, 64);
  const auto strategies = by_name(
      bench(task.net, kSpread, Batch(task.inputs), Batch(task.targets), of_size(250), short_run()));
  const int64_t none = strategies.at("retain-none").peak_bytes;
  const int64_t half = strategies.at("retain-half").peak_bytes;
  const int64_t all = strategies.at("retain-all").peak_bytes;
  const int64_t graph = 250 * 64 * sizeof(double);  // what one micro-batch keeps at least
  EXPECT_GE(half, none + 2 * graph);
  EXPECT_GE(all, half + 3 * graph);
}

TEST(Bench, RatiosAreThoseOfTheRounds) {
  Task task;
  const BenchReport report =
      bench(task.net, kSpread, Batch(task.inputs), Batch(task.targets), of_size(3), short_run());
  const auto strategies = by_name(report);
  const StrategyTimes& native = strategies.at("native");
  for (const auto& [name, times] : strategies) {
    std::vector<double> ratios;
    for (size_t i = 0; i < 3; ++i) {
      ratios.push_back(times.wall_seconds[i] / native.wall_seconds[i]);
    }
    std::sort(ratios.begin(), ratios.end());
    EXPECT_DOUBLE_EQ(times.wall.median, ratios[1]) << name;
    EXPECT_DOUBLE_EQ(times.wall.lower, (ratios[0] + ratios[1]) / 2) << name;
    EXPECT_DOUBLE_EQ(times.wall.upper, (ratios[1] + ratios[2]) / 2) << name;
  }
}

TEST(Bench, WhereNativeDoesNotFitTheCheapestIsTheReference) {
  Task task(20'000, 64);
  const memory::Limit limit(memory::stats(at::kCPU).live + (int64_t{4} << 20));
  const BenchReport report = bench(task.net, losses::mse(), Batch(task.inputs), Batch(task.targets),
                                   of_size(1000), short_run());
  const auto strategies = by_name(report);
  EXPECT_FALSE(strategies.at("native").timed());
  EXPECT_TRUE(strategies.at("native").cpu_seconds.empty());
  EXPECT_FALSE(strategies.at("retain-all").timed()) << "all graphs are as large as native's";
  ASSERT_TRUE(strategies.at("stream").timed());
  ASSERT_TRUE(strategies.at(report.reference).timed());
  EXPECT_EQ(strategies.at(report.reference).cpu.median, 1);
  std::map<std::string, double> medians;
  for (const auto& [name, times] : strategies) {
    if (!times.timed()) continue;
    std::vector<double> taken = times.cpu_seconds;
    std::sort(taken.begin(), taken.end());
    medians[name] = taken[1];
  }
  for (const auto& [name, seconds] : medians) EXPECT_GE(seconds, medians[report.reference]) << name;
  expect_says(report.explain(), "native was not timed: ");
  expect_says(report.explain(), "times over " + report.reference);
}

TEST(Bench, EverythingIsAsItWas) {
  Task task;
  task.net->register_buffer("calls", at::zeros({1}));
  at::Tensor first = task.net->parameters()[0];
  first.mutable_grad() = at::full_like(first, 2);
  const at::Tensor grad = first.grad();
  const at::Tensor before = first.detach().clone();
  torch::manual_seed(5);
  const at::Tensor drawn = at::rand({3});
  torch::manual_seed(5);
  int64_t calls = 0;
  Model model(task.net);
  at::Tensor drawn_first;
  model.forward = [&](const Batch& inputs) {
    ++calls;
    EXPECT_FALSE(first.grad().defined()) << "each run begins without gradients";
    const at::Tensor drawn_now = at::rand({1});
    if (!drawn_first.defined()) drawn_first = drawn_now;
    EXPECT_TRUE(at::equal(drawn_now, drawn_first)) << "and with the same random numbers";
    task.net->buffers()[0].add_(1);
    EXPECT_EQ(task.net->buffers()[0].item<float>(), 1) << "and with the same buffers";
    return Batch(task.net->forward(at::dropout(inputs.tensor(), 0.5, true)));
  };
  Options options = of_size(7);
  options.on_micro_batch = [](const MicroBatch&) { ADD_FAILURE() << "is not called"; };
  bench(model, losses::mse(), Batch(task.inputs), Batch(task.targets), options, short_run());
  EXPECT_GT(calls, 10);
  EXPECT_TRUE(at::equal(at::rand({3}), drawn));
  EXPECT_TRUE(first.grad().is_same(grad));
  EXPECT_TRUE(at::equal(grad, at::full_like(first, 2)));
  EXPECT_FALSE(task.net->parameters()[1].grad().defined());
  EXPECT_TRUE(at::equal(first, before));
  EXPECT_EQ(task.net->buffers()[0].item<float>(), 0);
}

TEST(Bench, TheModelsOwnErrorsComeBackAndLeaveNothing) {
  Task task;
  int64_t calls = 0;
  Model model(task.net);
  model.forward = [&](const Batch& inputs) {
    if (++calls == 9) throw std::runtime_error("mine");
    return Batch(task.net->forward(inputs.tensor()));
  };
  EXPECT_THROW(bench(model, losses::mse(), Batch(task.inputs), Batch(task.targets), of_size(2)),
               std::runtime_error);
  for (const at::Tensor& parameter : task.net->parameters())
    EXPECT_FALSE(parameter.grad().defined());
}

TEST(Bench, RefusesWhatItCannotMeasure) {
  Task task;
  const auto run = [&](Options options, const BenchOptions& how, const Batch& targets) {
    bench(task.net, losses::mse(), Batch(task.inputs), targets, options, how);
  };
  const auto refusal = [&](Options options, const BenchOptions& how) {
    return message_of<InvalidArgument>([&] { run(options, how, Batch(task.targets)); });
  };
  expect_says(refusal(of_size(2), {0, 60}), "rounds is 0");
  expect_says(refusal(of_size(2), {3, 0}), "seconds is 0");
  expect_says(refusal(of_size(2), {3, NAN}), "seconds is nan");
  expect_says(refusal(of_size(0), {}), "micro_batch_size is 0");
  Options retained = of_size(2);
  retained.retained_micro_batches = 1;
  expect_says(refusal(retained, {}), "leave retained_micro_batches");
  EXPECT_THROW(run(of_size(2), {}, Batch(task.targets.slice(0, 0, 5))), BatchError);
  const at::NoGradGuard no_grad;
  EXPECT_THROW(run(of_size(2), {}, Batch(task.targets)), StateError);
}

TEST(Bench, ABudgetThatFitsNothingIsAnError) {
  Task task(64, 2000);
  Options options;
  options.memory_budget = memory::stats(at::kCPU).live + 2000;
  EXPECT_THROW(
      bench(task.net, losses::mse(), Batch(task.inputs), Batch(task.targets), options, short_run()),
      BudgetExceeded);
  options.micro_batch_size = 2;
  EXPECT_THROW(
      bench(task.net, losses::mse(), Batch(task.inputs), Batch(task.targets), options, short_run()),
      BudgetExceeded);
}

}  // namespace
}  // namespace infinitybatch::testing
