// Trainer beside a loop by hand: the same bits; ends at any event and goes on; any loader.

#include <torch/torch.h>

#include <infinitybatch/infinitybatch.hpp>

#include <gtest/gtest.h>

#include <stdexcept>
#include <utility>
#include <vector>

namespace infinitybatch {
namespace {

using Pair = std::pair<at::Tensor, at::Tensor>;

struct Work {
  torch::nn::Sequential net{nullptr};
  std::vector<Pair> batches;

  Work() {
    torch::manual_seed(1);
    net = torch::nn::Sequential(torch::nn::Linear(6, 8), torch::nn::ReLU(), torch::nn::Dropout(0.3),
                                torch::nn::Linear(8, 4));
    net->to(torch::kDouble);
    for (int64_t size : {20, 20, 10}) {
      batches.emplace_back(torch::randn({size, 6}, torch::kDouble), torch::randint(4, {size}));
    }
    torch::manual_seed(2);
  }

  std::unique_ptr<GradientStep> step() const {
    return make_gradient_step(net, losses::cross_entropy(), {.micro_batch_size = 7});
  }
  std::vector<at::Tensor> bits() const {
    std::vector<at::Tensor> copies;
    for (const at::Tensor& parameter : net->parameters()) {
      copies.push_back(parameter.detach().clone());
    }
    return copies;
  }
};

bool equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (!torch::equal(a[i], b[i])) return false;
  }
  return a.size() == b.size();
}

std::vector<at::Tensor> by_hand(int epochs) {
  Work work;
  torch::optim::Adam adam(work.net->parameters(), torch::optim::AdamOptions(0.01));
  VirtualBatch batch(work.net, losses::cross_entropy(), {.micro_batch_size = 7});
  for (int epoch = 0; epoch < epochs; ++epoch) {
    for (const auto& [inputs, targets] : work.batches) {
      adam.zero_grad();
      batch.backward(inputs, targets);
      adam.step();
    }
  }
  return work.bits();
}

/// Throws once, the `count`-th time that the named event is told.
class Throws final : public Callback {
 public:
  Throws(std::string event, int count) : event_(std::move(event)), count_(count) {}
  void on_run_begin(const events::RunBegin& /*e*/) override { tell("run_begin"); }
  void on_run_end(const events::RunEnd& /*e*/) override { tell("run_end"); }
  void on_epoch_begin(const events::EpochBegin& /*e*/) override { tell("epoch_begin"); }
  void on_epoch_end(const events::EpochEnd& /*e*/) override { tell("epoch_end"); }
  void on_batch_begin(const events::BatchBegin& /*e*/) override { tell("batch_begin"); }
  void on_batch_end(const events::BatchEnd& /*e*/) override { tell("batch_end"); }
  void on_micro_batch(const events::MicroBatch& /*e*/) override { tell("micro_batch"); }

 private:
  void tell(const std::string& event) {
    if (event == event_ && --count_ == 0) throw std::logic_error(event);
  }

  std::string event_;
  int count_;
};

class Records final : public Callback {
 public:
  void on_batch_end(const events::BatchEnd& e) override { steps.push_back(e.step); }
  void on_epoch_end(const events::EpochEnd& e) override {
    samples.push_back(e.samples);
    rates.push_back(e.learning_rates.at(0));
  }
  void on_failure(const events::Failure& e) override { failed = e.exception != nullptr; }

  std::vector<int64_t> steps;
  std::vector<int64_t> samples;
  std::vector<double> rates;
  bool failed = false;
};

TEST(Trainer, GivesTheBitsOfALoopByHand) {
  Work work;
  torch::optim::Adam adam(work.net->parameters(), torch::optim::AdamOptions(0.01));
  const auto records = std::make_shared<Records>();
  Trainer trainer(work.step(), optimizers::of(adam), loaders::over(work.batches),
                  {.callbacks = records});
  trainer.run(3);
  EXPECT_TRUE(equal(work.bits(), by_hand(3)));
  EXPECT_EQ(records->samples, (std::vector<int64_t>{50, 50, 50}));
  EXPECT_EQ(records->steps.size(), 9U);
}

class TrainerEvents : public testing::TestWithParam<std::pair<const char*, int>> {};

TEST_P(TrainerEvents, GoesOnAfterAnExceptionWithTheSameBits) {
  Work work;
  torch::optim::Adam adam(work.net->parameters(), torch::optim::AdamOptions(0.01));
  const auto records = std::make_shared<Records>();
  const std::shared_ptr<Callback> throws =
      std::make_shared<Throws>(GetParam().first, GetParam().second);
  Trainer trainer(work.step(), optimizers::of(adam), loaders::over(work.batches),
                  {.callbacks = throws + records});
  EXPECT_THROW(trainer.run(3), std::logic_error);
  EXPECT_TRUE(records->failed);
  EXPECT_FALSE(trainer.running());
  trainer.run(3 - trainer.state().epoch);
  EXPECT_TRUE(equal(work.bits(), by_hand(3)));
  EXPECT_EQ(records->steps, (std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8}));
}

INSTANTIATE_TEST_SUITE_P(All, TrainerEvents,
                         testing::Values(std::pair("run_begin", 1), std::pair("run_end", 1),
                                         std::pair("epoch_begin", 2), std::pair("epoch_end", 1),
                                         std::pair("epoch_end", 3), std::pair("batch_begin", 1),
                                         std::pair("batch_begin", 5), std::pair("batch_end", 3),
                                         std::pair("batch_end", 5), std::pair("micro_batch", 5)));

TEST(Trainer, ReadsLoadersOfTorchData) {
  Work work;
  const auto inputs = torch::randn({50, 6}, torch::kDouble);
  const auto targets = torch::randint(4, {50});
  struct Rows : torch::data::datasets::Dataset<Rows> {
    at::Tensor x, y;
    Rows(at::Tensor x, at::Tensor y) : x(std::move(x)), y(std::move(y)) {}
    torch::data::Example<> get(size_t i) override {
      return {x[static_cast<int64_t>(i)], y[static_cast<int64_t>(i)]};
    }
    std::optional<size_t> size() const override { return 50; }
  };
  auto loader = torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(
      Rows(inputs, targets).map(torch::data::transforms::Stack<>()), 20);
  torch::optim::SGD sgd(work.net->parameters(), torch::optim::SGDOptions(0.1));
  torch::optim::StepLR schedule(sgd, 1, 0.5);
  const auto records = std::make_shared<Records>();
  Trainer trainer(work.step(), optimizers::of(sgd, /*clip_norm=*/0.1), loaders::over(*loader),
                  {.callbacks = records, .schedule = schedules::of(schedule)});
  trainer.run(2);
  EXPECT_EQ(trainer.state().step, 6);
  EXPECT_EQ(records->samples, (std::vector<int64_t>{50, 50}));
  // The first step of torch's own StepLR in C++ changes nothing yet.
  EXPECT_EQ(records->rates, (std::vector<double>{0.1, 0.05}));
}

TEST(Trainer, GoesOnInTheOrderOfAnEpochWhoseLoaderHasThrown) {
  struct Rows : torch::data::datasets::Dataset<Rows> {
    at::Tensor x = torch::randn({50, 6}, torch::kDouble);
    int64_t calls = 0;
    int64_t failing = -1;
    torch::data::Example<> get(size_t i) override {
      if (calls++ == failing) throw std::logic_error("row");
      const auto row = static_cast<int64_t>(i);
      return {x[row] + torch::rand({6}, torch::kDouble), torch::tensor(row % 4)};
    }
    std::optional<size_t> size() const override { return 50; }
  };
  const auto run = [](int64_t failing) {
    Work work;
    torch::manual_seed(3);
    Rows rows;
    rows.failing = failing;
    auto loader = torch::data::make_data_loader<torch::data::samplers::RandomSampler>(
        rows.map(torch::data::transforms::Stack<>()), 10);
    torch::optim::SGD sgd(work.net->parameters(), torch::optim::SGDOptions(0.1));
    Trainer trainer(work.step(), optimizers::of(sgd), loaders::over(*loader));
    if (failing >= 0) {
      EXPECT_THROW(trainer.run(2), std::logic_error);
    }
    trainer.run(2 - trainer.state().epoch);
    EXPECT_EQ(trainer.state().step, 10);
    return work.bits();
  };
  const auto whole = run(-1);
  for (const int64_t failing : {0, 5, 25, 78}) EXPECT_TRUE(equal(run(failing), whole)) << failing;
}

TEST(Trainer, CountsTheStepBeforeAScheduleThatThrows) {
  for (const auto by : {ScheduleBy::step, ScheduleBy::epoch}) {
    struct Fails final : Schedule {
      void step(double /*loss*/) override {
        if (++calls == 2) throw std::logic_error("schedule");
      }
      int calls = 0;
    };
    Work work;
    torch::optim::Adam adam(work.net->parameters(), torch::optim::AdamOptions(0.01));
    const auto records = std::make_shared<Records>();
    Trainer trainer(
        work.step(), optimizers::of(adam), loaders::over(work.batches),
        {.callbacks = records, .schedule = std::make_shared<Fails>(), .schedule_by = by});
    EXPECT_THROW(trainer.run(3), std::logic_error);
    EXPECT_EQ(trainer.state().step, by == ScheduleBy::step ? 2 : 6);
    trainer.run(3 - trainer.state().epoch);
    EXPECT_TRUE(equal(work.bits(), by_hand(3)));
    EXPECT_EQ(records->steps, (std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8}));
    EXPECT_EQ(records->samples, (std::vector<int64_t>{50, 50, 50}));
  }
}

TEST(Trainer, StopsAfterTheStepAtWorkAndEndsEndlessEpochs) {
  struct Stops final : Callback {
    void on_batch_begin(const events::BatchBegin& e) override {
      if (e.step == 3) e.trainer.stop();
    }
  };
  Work work;
  torch::optim::Adam adam(work.net->parameters(), torch::optim::AdamOptions(0.01));
  const auto endless = loaders::generated([&](int64_t) {
    return [&work, i = 0]() mutable -> std::optional<LogicalBatch> {
      const auto& [inputs, targets] = work.batches[static_cast<size_t>(i++ % 3)];
      return LogicalBatch(Batch(inputs), Batch(targets));
    };
  });
  Trainer trainer(work.step(), optimizers::of(adam), endless,
                  {.callbacks = std::make_shared<Stops>(), .batches_per_epoch = 3});
  trainer.run(3);
  EXPECT_EQ(trainer.state().step, 4);
  trainer.stop();  // between runs: of the next one, once
  trainer.run(1);
  EXPECT_EQ(trainer.state().step, 4);
  trainer.run(3 - trainer.state().epoch);
  EXPECT_TRUE(equal(work.bits(), by_hand(3)));
}

TEST(Trainer, RefusesWhatItCannotDo) {
  Work work;
  torch::optim::Adam adam(work.net->parameters());
  std::vector<Pair> none;
  Trainer trainer(work.step(), optimizers::of(adam), loaders::over(none));
  EXPECT_THROW(trainer.run(-1), InvalidArgument);
  EXPECT_THROW(trainer.run(1), StateError);
  EXPECT_THROW(Trainer(nullptr, optimizers::of(adam), loaders::over(none)), InvalidArgument);
  EXPECT_THROW(
      Trainer(work.step(), optimizers::of(adam), loaders::over(none), {.batches_per_epoch = 0}),
      InvalidArgument);
}

TEST(Trainer, TellsOfEvaluationsAndCheckpoints) {
  struct Hears final : Callback {
    void on_evaluation_begin(const events::EvaluationBegin& /*e*/) override { told += "b"; }
    void on_evaluation_end(const events::EvaluationEnd& e) override {
      told += "e" + std::to_string(e.samples) + std::to_string(e.metrics.count("right"));
    }
    void on_checkpoint_saved(const events::CheckpointSaved& e) override { told += e.path; }
    std::string told;
  };
  Work work;
  torch::optim::Adam adam(work.net->parameters());
  const auto hears = std::make_shared<Hears>();
  Trainer trainer(work.step(), optimizers::of(adam), loaders::over(work.batches),
                  {.callbacks = hears});
  Evaluation evaluation(work.net, losses::cross_entropy(), {.micro_batch_size = 7});
  const auto loader = loaders::over(work.batches);
  const auto end = trainer.evaluate(evaluation, *loader,
                                    [] { return std::map<std::string, double>{{"right", 1.0}}; });
  EXPECT_EQ(end.loss, evaluation.loss());
  trainer.saved("x.pt");
  EXPECT_EQ(hears->told, "be501x.pt");
}

TEST(Evaluation, IsTheWholeSetAndLeavesNoTrace) {
  Work work;
  work.net->eval();
  torch::manual_seed(4);
  const at::Tensor expected_random = torch::rand(3);
  torch::manual_seed(4);
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> targets;
  double loss = 0;
  int64_t seen = 0;
  {
    Options options;
    options.micro_batch_size = 7;
    options.on_micro_batch = [&](const MicroBatch& rows) {
      torch::rand(2);
      seen += rows.end - rows.begin;
    };
    Evaluation evaluation(work.net, losses::cross_entropy(), options);
    for (const auto& [x, y] : work.batches) {
      evaluation.add(x, y);
      inputs.push_back(x);
      targets.push_back(y);
    }
    loss = evaluation.loss();
    EXPECT_EQ(evaluation.samples(), 50);
  }
  EXPECT_EQ(seen, 50);
  EXPECT_TRUE(torch::equal(torch::rand(3), expected_random));
  const at::Tensor native = torch::nn::functional::cross_entropy(
      work.net->forward(torch::cat(inputs)), torch::cat(targets));
  EXPECT_NEAR(loss, native.item<double>(), 1e-14);
}

}  // namespace
}  // namespace infinitybatch
