// The budget is a promise: the peak never passes it, predictions are those of the executor, and
// what cannot fit is said with numbers before anything changes.
#include "step/support.hpp"

#include <cstdlib>

namespace infinitybatch::testing {
namespace {

constexpr int64_t kKiB = 1024;

int64_t live() {
  return memory::stats(at::kCPU).live;
}

/// Threads as asked for while it lives, then as before.
class Threads {
 public:
  explicit Threads(int count) : before_(at::get_num_threads()) { at::set_num_threads(count); }
  ~Threads() { at::set_num_threads(before_); }

 private:
  int before_;
};

struct Workload {
  std::string name;
  int64_t samples = 0;
  int64_t room = 0;  ///< bytes of budget above what is live before the step
  std::function<Model()> model;
  std::vector<int64_t> input_shape;
};

/// Attention as the encoder layers of torch::nn do it, dropout off.
struct Encoder : nn::Module {
  Encoder() {
    encoder = register_module(
        "encoder", nn::TransformerEncoder(
                       nn::TransformerEncoderLayer(
                           nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(16).dropout(0)),
                       1));
    out = register_module("out", nn::Linear(8, 4));
  }
  at::Tensor forward(const at::Tensor& x) { return out(encoder(x.transpose(0, 1)).mean(0)); }
  nn::TransformerEncoder encoder = nullptr;
  nn::Linear out = nullptr;
};

/// \param two_threads leaves out the larger N where INFINITYBATCH_LONG_TESTS does not ask for it:
/// with
///                    other processes beside it two threads wait for each other most of the time
std::vector<Workload> workloads(bool two_threads) {
  const auto mlp = [] {
    return Model(nn::Sequential(nn::Linear(16, 64), nn::ReLU(), nn::Linear(64, 64), nn::ReLU(),
                                nn::Linear(64, 4)));
  };
  const auto conv = [] {
    return Model(nn::Sequential(nn::Conv2d(nn::Conv2dOptions(1, 6, 3).padding(1)), nn::ReLU(),
                                nn::GroupNorm(2, 6), nn::Conv2d(nn::Conv2dOptions(6, 6, 3)),
                                nn::ReLU(), nn::Flatten(), nn::Linear(6 * 4 * 4, 4)));
  };
  const auto encoder = [] { return Model(std::make_shared<Encoder>()); };
  std::vector<Workload> rows;
  for (const int64_t samples : {256, 4096}) {
    if (two_threads && samples > 256 && std::getenv("INFINITYBATCH_LONG_TESTS") == nullptr)
      continue;
    // The whole batch would take several times the room.
    const std::string n = "_" + std::to_string(samples);
    rows.push_back({"mlp" + n, samples, 160 * kKiB + samples * 16, mlp, {16}});
    rows.push_back({"conv" + n, samples, 256 * kKiB + samples * 16, conv, {1, 6, 6}});
    rows.push_back({"encoder" + n, samples, 256 * kKiB + samples * 16, encoder, {6, 8}});
  }
  return rows;
}

struct Prepared {
  explicit Prepared(const Workload& work) {
    torch::manual_seed(2);
    model = work.model();
    std::vector<int64_t> shape = work.input_shape;
    shape.insert(shape.begin(), work.samples);
    inputs = at::randn(shape);
    targets = at::randint(4, {work.samples}, at::kLong);
  }
  std::vector<at::Tensor> gradients() const {
    std::vector<at::Tensor> result;
    for (const NamedParameter& parameter : model.parameters()) {
      result.push_back(parameter.tensor.grad());
    }
    return result;
  }
  void zero_grad() const {
    for (const NamedParameter& parameter : model.parameters()) {
      at::Tensor(parameter.tensor).mutable_grad().reset();
    }
  }
  Model model;
  at::Tensor inputs, targets;
};

class Budgeted : public ::testing::TestWithParam<Workload> {
 protected:
  /// Steps until the plan is settled, then a few more; every one inside the budget.
  void train(int threads, double tolerance) {
    const Threads limited(threads);
    const Workload& work = GetParam();
    const Prepared prepared(work);
    // The first call of a kernel keeps memory of its own: as in any training, not in the first
    // step.
    prepared.model.forward(prepared.inputs.slice(0, 0, 4)).tensor().sum().backward();
    prepared.zero_grad();
    const int settled_steps = threads == 1 ? 4 : 2;
    Options options;
    options.memory_budget = live() + work.room;
    VirtualBatch batch(prepared.model, losses::cross_entropy(), options);
    int settled = 0;
    for (int step = 0; step < 40 && settled < settled_steps; ++step) {
      prepared.zero_grad();
      const StepReport report = batch.backward(prepared.inputs, prepared.targets);
      ASSERT_EQ(*report.memory_budget, options.memory_budget->resolve(at::kCPU));
      EXPECT_LE(report.peak_bytes, *report.memory_budget) << "step " << step;
      EXPECT_GT(report.micro_batch_sizes.size(), 1u);
      if (!report.predicted_peak_bytes) continue;
      ++settled;
      EXPECT_EQ(report.restarts, 0) << "step " << step;
      const double off = std::abs(static_cast<double>(*report.predicted_peak_bytes) /
                                      static_cast<double>(report.peak_bytes) -
                                  1.0);
      EXPECT_LE(off, tolerance) << "predicted " << *report.predicted_peak_bytes << ", measured "
                                << report.peak_bytes;
      // Above the baseline too, which would hide an error behind the inputs' bytes.
      const auto above = static_cast<double>(report.peak_bytes - base_of(report));
      EXPECT_LE(std::abs(static_cast<double>(*report.predicted_peak_bytes - report.peak_bytes)),
                5 * tolerance * above);
    }
    EXPECT_GE(settled, settled_steps) << "the plan never settled";
    check_gradients(prepared);
  }

 private:
  int64_t base_of(const StepReport& report) const {
    return *report.memory_budget - GetParam().room;
  }
  static void check_gradients(const Prepared& prepared) {
    const auto ours = prepared.gradients();
    std::vector<at::Tensor> copies;
    for (const at::Tensor& gradient : ours) copies.push_back(gradient.clone());
    prepared.zero_grad();
    at::cross_entropy_loss(prepared.model.forward(prepared.inputs).tensor(), prepared.targets)
        .backward();
    const auto native = prepared.gradients();
    double largest = 0;
    for (const at::Tensor& gradient : native) {
      largest = std::max(largest, gradient.norm().item<double>());
    }
    for (size_t i = 0; i < native.size(); ++i) {
      EXPECT_LE((copies[i] - native[i]).norm().item<double>(), 1e-4 * largest) << i;
    }
  }
};

class BudgetedWithTwoThreads : public Budgeted {};

TEST_P(Budgeted, StaysInsideAndPredicts) {
  train(1, 0.01);
}
TEST_P(BudgetedWithTwoThreads, StaysInsideAndPredicts) {
  train(2, 0.02);
}

std::string name_of_workload(const ::testing::TestParamInfo<Workload>& info) {
  return info.param.name;
}

INSTANTIATE_TEST_SUITE_P(Step, Budgeted, ::testing::ValuesIn(workloads(false)), name_of_workload);
INSTANTIATE_TEST_SUITE_P(Step, BudgetedWithTwoThreads, ::testing::ValuesIn(workloads(true)),
                         name_of_workload);

Workload small_mlp(int64_t samples) {
  Workload work = workloads(false)[0];
  work.samples = samples;
  return work;
}

TEST(Budget, SaysWithNumbersWhatCannotFitAndChangesNothing) {
  const Prepared prepared(small_mlp(64));
  at::Tensor weight = prepared.model.parameters()[0].tensor;
  weight.mutable_grad() = at::ones_like(weight).detach();
  const at::Tensor kept = weight.grad();
  for (const int64_t room : {-kKiB, int64_t{0}, 16 * kKiB}) {
    const int64_t before = live();
    Options options;
    options.memory_budget = before + room;
    VirtualBatch batch(prepared.model, losses::cross_entropy(), options);
    for (int attempt = 0; attempt < 2; ++attempt) {
      try {
        batch.backward(prepared.inputs, prepared.targets);
        FAIL() << "gradients alone need more than " << room << " bytes";
      } catch (const BudgetExceeded& error) {
        EXPECT_EQ(error.limit(), before + room);
        EXPECT_GT(error.needed(), error.limit());
        EXPECT_GT(error.smallest_feasible().value_or(error.needed()), error.limit());
        expect_says(error.what(), "budget");
      }
      EXPECT_TRUE(weight.grad().is_same(kept));
      EXPECT_TRUE(weight.grad().equal(at::ones_like(weight)));
      EXPECT_FALSE(prepared.model.parameters()[1].tensor.grad().defined());
    }
    EXPECT_EQ(live(), before);
  }
}

// Once the planner knows the model it can say which budget would do, and that one does.
TEST(Budget, TheSmallestFeasibleBudgetIsFeasible) {
  const Prepared prepared(small_mlp(64));
  Options options;
  options.memory_budget = live() + 256 * kKiB;
  VirtualBatch batch(prepared.model, losses::cross_entropy(), options);
  for (int step = 0; step < 10; ++step) {
    prepared.zero_grad();
    batch.backward(prepared.inputs, prepared.targets);
  }
  prepared.zero_grad();
  std::optional<int64_t> smallest;
  {
    const at::Tensor optimizer_state = at::empty({250 * kKiB}, at::kByte);
    try {
      batch.backward(prepared.inputs, prepared.targets);
      FAIL() << "6 KiB are too few";
    } catch (const BudgetExceeded& error) {
      EXPECT_EQ(error.needed(), error.smallest_feasible());
      ASSERT_TRUE(error.smallest_feasible().has_value());
      smallest = *error.smallest_feasible() - static_cast<int64_t>(optimizer_state.nbytes());
    }
  }
  options.memory_budget = *smallest;
  VirtualBatch tight(prepared.model, losses::cross_entropy(), options);
  EXPECT_LE(tight.backward(prepared.inputs, prepared.targets).peak_bytes, *smallest);
  prepared.zero_grad();
  // And it is about the smallest: a tenth less above what is live before does not do.
  options.memory_budget = live() + (*smallest - live()) * 9 / 10;
  VirtualBatch tighter(prepared.model, losses::cross_entropy(), options);
  EXPECT_THROW(tighter.backward(prepared.inputs, prepared.targets), BudgetExceeded);
}

TEST(Budget, AFixedSizeKeepsTheBudgetToo) {
  const Prepared prepared(small_mlp(256));
  Options options = of_size(256);
  options.memory_budget = live() + 96 * kKiB;
  VirtualBatch whole(prepared.model, losses::cross_entropy(), options);
  expect_says(
      message_of<BudgetExceeded>([&] { whole.backward(prepared.inputs, prepared.targets); }),
      "micro_batch_size=256");
  for (const at::Tensor& gradient : prepared.gradients()) EXPECT_FALSE(gradient.defined());
  options.micro_batch_size = 8;
  const StepReport report = VirtualBatch(prepared.model, losses::cross_entropy(), options)
                                .backward(prepared.inputs, prepared.targets);
  EXPECT_LE(report.peak_bytes, *report.memory_budget);
}

class FewSamples : public ::testing::TestWithParam<int64_t> {};

TEST_P(FewSamples, StayInsideABudgetThatHoldsOneOrTwo) {
  const Prepared prepared(small_mlp(GetParam()));
  Options options;
  options.memory_budget = live() + 96 * kKiB;
  VirtualBatch batch(prepared.model, losses::cross_entropy(), options);
  for (int step = 0; step < 4; ++step) {
    prepared.zero_grad();
    const StepReport report = batch.backward(prepared.inputs, prepared.targets);
    EXPECT_LE(report.peak_bytes, *report.memory_budget);
    int64_t rows = 0;
    for (const int64_t size : report.micro_batch_sizes) rows += size;
    EXPECT_EQ(rows, GetParam());
  }
}

INSTANTIATE_TEST_SUITE_P(Step, FewSamples, ::testing::Range(int64_t{1}, int64_t{8}),
                         ::testing::PrintToStringParamName());

TEST(Budget, ShrinksTheMicroBatchesWithTheBudget) {
  const Prepared prepared(small_mlp(512));
  std::vector<int64_t> peaks;
  std::vector<size_t> counts;
  for (const int64_t room : {4096 * kKiB, 512 * kKiB, 192 * kKiB, 112 * kKiB}) {
    prepared.zero_grad();
    Options options;
    options.memory_budget = live() + room;
    const int64_t before = live();
    VirtualBatch batch(prepared.model, losses::cross_entropy(), options);
    StepReport report;
    for (int step = 0; step < 12; ++step) {
      prepared.zero_grad();
      report = batch.backward(prepared.inputs, prepared.targets);
      EXPECT_LE(report.peak_bytes, before + room);
    }
    counts.push_back(report.micro_batch_sizes.size());
  }
  EXPECT_GT(counts.back(), counts.front());
  EXPECT_GT(counts.back(), 4u);
}

// Adam's state arrives after the first step: the same budget leaves less room, the plan follows.
TEST(Budget, FollowsOptimizerStateThatArrivesLater) {
  const Prepared prepared(small_mlp(256));
  std::vector<at::Tensor> parameters;
  int64_t parameter_bytes = 0;
  for (const NamedParameter& parameter : prepared.model.parameters()) {
    parameters.push_back(parameter.tensor);
    parameter_bytes += static_cast<int64_t>(parameter.tensor.nbytes());
  }
  torch::optim::Adam optimizer(parameters, torch::optim::AdamOptions(1e-3));
  Options options;
  options.memory_budget = live() + 3 * parameter_bytes + 96 * kKiB;
  VirtualBatch batch(prepared.model, losses::cross_entropy(), options);
  for (int step = 0; step < 8; ++step) {
    optimizer.zero_grad();
    const StepReport report = batch.backward(prepared.inputs, prepared.targets);
    EXPECT_LE(report.peak_bytes, *report.memory_budget) << step;
    optimizer.step();
  }
}

TEST(Budget, PlanLeavesEverythingAsItWas) {
  const Prepared prepared(small_mlp(128));
  Options options;
  options.memory_budget = live() + 256 * kKiB;
  VirtualBatch batch(prepared.model, losses::cross_entropy(), options);
  const int64_t before = live();
  const Plan plan = batch.plan(prepared.inputs, prepared.targets);
  EXPECT_EQ(live(), before);
  for (const at::Tensor& gradient : prepared.gradients()) EXPECT_FALSE(gradient.defined());
  EXPECT_EQ(plan.batch_size, 128);
  EXPECT_EQ(plan.strategy, "stream");
  ASSERT_TRUE(plan.predicted_peak_bytes.has_value());
  EXPECT_LE(*plan.predicted_peak_bytes, before + 256 * kKiB);
  EXPECT_EQ(*plan.budget_bytes, before + 256 * kKiB);
  EXPECT_FALSE(plan.candidates.empty());
  EXPECT_EQ(plan.instructions.back().operation, Operation::hand_out);
}

TEST(Budget, ExplainNamesTheNumbers) {
  const Prepared prepared(small_mlp(128));
  Options options;
  options.memory_budget = live() + 256 * kKiB;
  VirtualBatch batch(prepared.model, losses::cross_entropy(), options);
  const Plan plan = batch.plan(prepared.inputs, prepared.targets);
  const std::string text = plan.explain();
  expect_says(text, "128 samples");
  expect_says(text, format_bytes(*plan.budget_bytes));
  expect_says(text, format_bytes(*plan.predicted_peak_bytes));
  expect_says(text, format_bytes(plan.baseline_bytes));
  expect_says(text, plan.reason);
  for (const Candidate& candidate : plan.candidates) {
    expect_says(text, std::to_string(candidate.micro_batch_size));
    expect_says(text, format_bytes(candidate.peak_bytes));
  }
}

// Memory that depends on the data's values: a margin is planned, and the promise kept.
struct Routed : nn::Module {
  Routed() {
    small = register_module("small", nn::Linear(8, 8));
    large = register_module("large", nn::Linear(8, 128));
    out = register_module("out", nn::Linear(128, 4));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor rows = x.select(1, 0).gt(0).nonzero().squeeze(1);
    at::Tensor hidden = at::zeros({x.size(0), 128}, x.options());
    if (rows.numel() > 0) hidden = hidden.index_add(0, rows, large(x.index_select(0, rows)).tanh());
    return out(hidden) + small(x).narrow(1, 0, 4);
  }
  nn::Linear small = nullptr, large = nullptr, out = nullptr;
};

TEST(Budget, HoldsForMemoryThatDependsOnTheData) {
  Workload work = small_mlp(256);
  work.model = [] { return Model(std::make_shared<Routed>()); };
  work.input_shape = {8};
  const Prepared prepared(work);
  const at::Tensor turned = -prepared.inputs;
  Options options;
  options.memory_budget = live() + 128 * kKiB;
  VirtualBatch batch(prepared.model, losses::cross_entropy(), options);
  for (int step = 0; step < 10; ++step) {
    prepared.zero_grad();
    const StepReport report =
        batch.backward(step % 2 == 0 ? prepared.inputs : turned, prepared.targets);
    EXPECT_LE(report.peak_bytes, *report.memory_budget);
  }
}

}  // namespace
}  // namespace infinitybatch::testing
