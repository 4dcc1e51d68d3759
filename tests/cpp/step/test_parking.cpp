// Copies of what waits fail in the background, wherever they are: a typed error, and everything as
// it was.
#include "support.hpp"

#include <infinitybatch/park/failure_injection.hpp>

#include <cerrno>

namespace infinitybatch {
namespace {

using namespace testing;

struct Parked {
  Parked() {
    torch::manual_seed(4);
    net = nn::Sequential(nn::Linear(6, 8), nn::BatchNorm1d(8), nn::Tanh(), nn::Linear(8, 8),
                         nn::BatchNorm1d(8), nn::Tanh(), nn::Linear(8, 2));
    net->to(at::kDouble);
    inputs = at::randn({20, 6}, at::kDouble);
    targets = at::randn({20, 2}, at::kDouble);
    options = of_size(4);
    options.parking.when = Parking::When::always;
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

TEST(Parking, AFailingDiskIsATypedErrorWhereverItFails) {
  Parked task;
  int64_t transfers = 0;
  {
    Parked counted;
    const park::FailDisk counting(park::FailDisk::kNever);
    VirtualBatch batch(counted.net, losses::mse(), counted.options);
    const StepReport report = batch.backward(counted.inputs, counted.targets);
    EXPECT_GT(report.parked_bytes, 0);
    EXPECT_TRUE(batch.plan(counted.inputs, counted.targets).overlaps);
    transfers = counting.seen() / 2;
  }
  ASSERT_GT(transfers, 30);
  VirtualBatch batch(task.net, losses::mse(), task.options);
  const std::vector<at::Tensor> before = task.state();
  const int64_t live = memory::stats(at::kCPU).live;
  for (int64_t n = 1; n <= transfers; n += 3) {
    {
      const park::FailDisk failure(n, n % 2 == 0 ? ENOSPC : EIO);
      EXPECT_THROW(batch.backward(task.inputs, task.targets), ParkingError) << n;
    }
    EXPECT_EQ(memory::stats(at::kCPU).live, live) << n;
    const std::vector<at::Tensor> after = task.state();
    for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(at::equal(before[i], after[i])) << n;
    for (const at::Tensor& parameter : task.net->parameters()) {
      EXPECT_FALSE(parameter.grad().defined()) << n;
    }
  }
  Parked twin;
  const at::Tensor loss = at::mse_loss(twin.net->forward(twin.inputs), twin.targets);
  const auto expected = torch::autograd::grad({loss}, twin.net->parameters());
  batch.backward(task.inputs, task.targets);
  const auto parameters = task.net->parameters();
  for (size_t i = 0; i < expected.size(); ++i) {
    // A bias in front of BatchNorm has none.
    EXPECT_LE((parameters[i].grad() - expected[i]).abs().max().item<double>(), 1e-12) << i;
  }
}

}  // namespace
}  // namespace infinitybatch
