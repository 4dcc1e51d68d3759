// Copies of what waits fail in the background, wherever they are: a typed error, and everything as
// it was.
#include "offload/failure_injection.hpp"
#include "support.hpp"

#include <infinitybatch/step/wrap.hpp>

#include <cerrno>

namespace infinitybatch {
namespace {

using namespace testing;

struct Offloaded {
  /// \param whole_batch whether the model has layers that see all of it
  explicit Offloaded(bool whole_batch = true) {
    torch::manual_seed(4);
    net = nn::Sequential(nn::Linear(6, 8));
    for (int layer = 0; layer < 2; ++layer) {
      if (whole_batch) net->push_back(nn::BatchNorm1d(8));
      net->push_back(nn::Tanh());
      net->push_back(layer == 0 ? nn::Linear(8, 8) : nn::Linear(8, 2));
    }
    net->to(at::kDouble);
    inputs = at::randn({20, 6}, at::kDouble);
    targets = at::randn({20, 2}, at::kDouble);
    options = of_size(4);
    options.offload.when = Offload::When::always;
  }
  std::vector<at::Tensor> state() const {
    std::vector<at::Tensor> all;
    for (const at::Tensor& tensor : net->parameters()) all.push_back(tensor.detach().clone());
    for (const at::Tensor& tensor : net->buffers()) all.push_back(tensor.clone());
    return all;
  }
  nn::Sequential net = nullptr;
  at::Tensor inputs, targets;
  Options options;
};

TEST(Offload, AFailingDiskIsATypedErrorWhereverItFails) {
  Offloaded task;
  int64_t transfers = 0;
  {
    Offloaded counted;
    const offload::FailDisk counting(offload::FailDisk::kNever);
    VirtualBatch batch(counted.net, losses::mse(), counted.options);
    const StepReport report = batch.backward(counted.inputs, counted.targets);
    EXPECT_GT(report.offloaded_bytes, 0);
    EXPECT_TRUE(batch.plan(counted.inputs, counted.targets).overlaps);
    transfers = counting.seen() / 2;
  }
  ASSERT_GT(transfers, 30);
  VirtualBatch batch(task.net, losses::mse(), task.options);
  const std::vector<at::Tensor> before = task.state();
  const int64_t live = memory::stats(at::kCPU).live;
  for (int64_t n = 1; n <= transfers; n += 3) {
    {
      const offload::FailDisk failure(n, n % 2 == 0 ? ENOSPC : EIO);
      EXPECT_THROW(batch.backward(task.inputs, task.targets), OffloadError) << n;
    }
    EXPECT_EQ(memory::stats(at::kCPU).live, live) << n;
    const std::vector<at::Tensor> after = task.state();
    for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(at::equal(before[i], after[i])) << n;
    for (const at::Tensor& parameter : task.net->parameters()) {
      EXPECT_FALSE(parameter.grad().defined()) << n;
    }
  }
  Offloaded twin;
  const at::Tensor loss = at::mse_loss(twin.net->forward(twin.inputs), twin.targets);
  const auto expected = torch::autograd::grad({loss}, twin.net->parameters());
  batch.backward(task.inputs, task.targets);
  const auto parameters = task.net->parameters();
  for (size_t i = 0; i < expected.size(); ++i) {
    // A bias in front of BatchNorm has none.
    EXPECT_LE((parameters[i].grad() - expected[i]).abs().max().item<double>(), 1e-12) << i;
  }
}

/// Loss and backward through a wrapped model, as a caller's loop has them.
void step(const Wrap& wrapped, const Offloaded& task) {
  const at::Tensor outputs = wrapped.forward(task.inputs).tensor();
  at::mse_loss(outputs, task.targets).backward();
}

/// \param whole_batch what waits for layers that see all of it is offloaded; else graphs
void fail_in_either_pass(bool whole_batch) {
  Options options;
  options.micro_batch_size = 4;
  options.retained_micro_batches = whole_batch ? 0 : 5;
  options.offload.when = Offload::When::always;
  int64_t transfers = 0;
  {
    Offloaded counted(whole_batch);
    const Wrap wrapped(counted.net, options);
    step(wrapped, counted);  // the first call meets the layers without offloading
    for (const at::Tensor& parameter : counted.net->parameters()) parameter.mutable_grad().reset();
    const offload::FailDisk counting(offload::FailDisk::kNever);
    step(wrapped, counted);
    transfers = counting.seen();
  }
  ASSERT_GT(transfers, 18);
  Offloaded task(whole_batch);
  const Wrap wrapped(task.net, options);
  step(wrapped, task);
  for (const at::Tensor& parameter : task.net->parameters()) parameter.mutable_grad().reset();
  Offloaded twin(whole_batch);
  const at::Tensor loss = at::mse_loss(twin.net->forward(twin.inputs), twin.targets);
  const auto expected = torch::autograd::grad({loss}, twin.net->parameters());
  const auto check_gradients = [&](int64_t n) {
    const auto parameters = task.net->parameters();
    for (size_t i = 0; i < expected.size(); ++i) {
      at::Tensor& found = parameters[i].mutable_grad();
      EXPECT_LE((found - expected[i]).abs().max().item<double>(), 1e-12) << n << ", " << i;
      found.reset();
    }
  };
  const int64_t live = memory::stats(at::kCPU).live;
  int64_t in_forward = 0;
  int64_t in_backward = 0;
  for (int64_t n = 1; n <= transfers; n += whole_batch ? 3 : 1) {
    const std::vector<at::Tensor> before = task.state();
    const offload::FailDisk failure(n, n % 2 == 0 ? ENOSPC : EIO);
    bool forward = true;
    at::Tensor mean;
    try {
      mean = at::mse_loss(wrapped.forward(task.inputs).tensor(), task.targets);
      forward = false;
      mean.backward({}, /*retain_graph=*/!whole_batch);
      ADD_FAILURE() << n;
    } catch (const OffloadError&) {
      ++(forward ? in_forward : in_backward);
    }
    if (forward) {
      const std::vector<at::Tensor> after = task.state();
      for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(at::equal(before[i], after[i])) << n;
    }
    for (const at::Tensor& parameter : task.net->parameters()) {
      EXPECT_FALSE(parameter.grad().defined()) << n;
    }
    if (whole_batch || forward) continue;
    mean.backward();  // its graphs are lost, its tapes are not
    check_gradients(n);
  }
  EXPECT_EQ(memory::stats(at::kCPU).live, live);
  EXPECT_GT(in_forward, 5);
  EXPECT_GT(in_backward, 5);
  step(wrapped, task);
  check_gradients(0);
}

TEST(Offload, AFailingDiskInEitherPassOfAWrappedModel) {
  fail_in_either_pass(/*whole_batch=*/true);
}

TEST(Offload, AFailingDiskInEitherPassOfAWrappedModelThatKeepsGraphs) {
  fail_in_either_pass(/*whole_batch=*/false);
}

}  // namespace
}  // namespace infinitybatch
