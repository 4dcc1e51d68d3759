// Several threads at once: steps of different models, wrapped models, and copies of what is
// offloaded behind them.
#include "offload/store.hpp"
#include "step/support.hpp"

#include <infinitybatch/step/wrap.hpp>

#include <functional>
#include <mutex>
#include <thread>

namespace infinitybatch::testing {
namespace {

constexpr int kSteps = 4;

/// Layers that see the whole batch, so that what waits at the cuts can be offloaded.
struct Normed {
  Normed() {
    torch::manual_seed(4);
    // Without biases that a BatchNorm takes away again: their gradients are rounding.
    const auto plain = [](int64_t from) {
      return nn::Linear(nn::LinearOptions(from, 8).bias(false));
    };
    net = nn::Sequential(plain(6), nn::BatchNorm1d(8), nn::Tanh(), plain(8), nn::BatchNorm1d(8),
                         nn::Tanh(), nn::Linear(8, 2));
    net->to(at::kDouble);
    inputs = at::randn({20, 6}, at::kDouble);
    targets = at::randn({20, 2}, at::kDouble);
  }
  std::vector<at::Tensor> native_gradients() {
    return torch::autograd::grad({at::mse_loss(net->forward(inputs), targets)}, net->parameters());
  }
  nn::Sequential net = nullptr;
  at::Tensor inputs, targets;
};

at::Tensor coupled(const Batch& outputs, const Batch& targets) {
  const at::Tensor scores = outputs.tensor();
  return at::mse_loss(scores, targets.tensor()) + scores.mm(scores.t()).logsumexp(1).mean();
}

/// The same in several threads, each with a model of its own.
template <typename Model>
void in_threads(size_t count, const std::function<void(Model&)>& run) {
  std::vector<Model> models(count);
  std::vector<std::thread> threads;
  threads.reserve(count);
  for (Model& model : models) threads.emplace_back([&run, &model] { run(model); });
  for (std::thread& thread : threads) thread.join();
}

void steps(Normed& model, const Loss& loss, const Options& options,
           const std::function<std::vector<at::Tensor>(Normed&)>& wanted) {
  VirtualBatch batch(model.net, loss, options);
  for (int i = 0; i < kSteps; ++i) {
    model.net->zero_grad();
    batch.backward(model.inputs, model.targets);
  }
  expect_gradients(*model.net, wanted(model));
}

std::vector<at::Tensor> of_coupled(Normed& model) {
  return torch::autograd::grad({coupled(model.net->forward(model.inputs), model.targets)},
                               model.net->parameters());
}

TEST(Threads, StepsOfDifferentModels) {
  in_threads<Normed>(3, [](Normed& model) {
    steps(model, losses::mse(), of_size(6), [](Normed& each) { return each.native_gradients(); });
  });
}

TEST(Threads, StepsThatOffloadBehindTheirWork) {
  Options options = of_size(4);
  options.offload.when = Offload::When::always;
  in_threads<Normed>(3, [&](Normed& model) {
    steps(model, losses::mse(), options, [](Normed& each) { return each.native_gradients(); });
    steps(model, losses::coupled(coupled), options, of_coupled);
  });
}

TEST(Threads, StepsUnderABudget) {
  Options options;
  options.memory_budget = memory::Budget(memory::stats(at::kCPU).live + (64 << 20));
  in_threads<Task>(2, [&](Task& task) {
    VirtualBatch batch(task.net, losses::coupled(coupled), options);
    for (int i = 0; i < kSteps; ++i) {
      task.net->zero_grad();
      batch.backward(task.inputs, task.targets);
    }
    const at::Tensor value = coupled(task.net->forward(task.inputs), task.targets);
    expect_gradients(*task.net, torch::autograd::grad({value}, task.net->parameters()));
  });
}

TEST(Threads, RecordingsThatAreUsedAgain) {
  Options options = of_size(5);
  options.static_graph = true;
  in_threads<Normed>(3, [&](Normed& model) {
    steps(model, losses::mse(), options, [](Normed& each) { return each.native_gradients(); });
  });
}

TEST(Threads, WrappedModels) {
  in_threads<Task>(3, [](Task& task) {
    Options options;
    options.micro_batch_size = 2;
    const Wrap wrapped(task.net, options);
    for (int i = 0; i < kSteps; ++i) {
      task.net->zero_grad();
      at::mse_loss(wrapped.forward(task.inputs).tensor(), task.targets).backward();
    }
    expect_gradients(*task.net, task.native_gradients());
  });
}

// The calls of one wrapped model share its parameters' accumulators: in turns.
TEST(Threads, OneWrappedModelInTwoThreadsInTurns) {
  Task task;
  Options options;
  options.micro_batch_size = 2;
  const Wrap wrapped(task.net, options);
  const std::vector<at::Tensor> wanted = task.native_gradients();
  std::mutex turn;
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < kSteps; ++i) {
        const std::lock_guard<std::mutex> mine(turn);
        const at::Tensor loss = at::mse_loss(wrapped.forward(task.inputs).tensor(), task.targets);
        const std::vector<at::Tensor> found = torch::autograd::grad({loss}, task.net->parameters());
        for (size_t p = 0; p < found.size(); ++p) EXPECT_LE(error(found[p], wanted[p]), 1e-12);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(Threads, CopiesBehindTheWorkOfEach) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([t] {
      offload::Store store(at::kCPU, {.host_bytes = 1 << 20, .disk = false, .bandwidth = 1e9});
      for (int i = 0; i < 20; ++i) {
        const std::vector<at::Tensor> values{at::full({10000}, t * 100 + i, at::kDouble)};
        offload::Offloaded offloaded = store.start_put(values);
        const double read = values[0].sum().item<double>();  // while the copy runs
        EXPECT_EQ(read, 10000.0 * (t * 100 + i));
        offloaded.finish_put();
        offloaded.prefetch();
        EXPECT_GT(store.statistics().seconds_copying, 0);
        offloaded.bring_back();
        EXPECT_TRUE(values[0].eq(t * 100 + i).all().item<bool>());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace infinitybatch::testing
