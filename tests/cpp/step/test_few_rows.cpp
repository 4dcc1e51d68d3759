// Modules that refuse few samples, under a budget: larger micro-batches are tried.
#include "step/support.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/memory/statistics.hpp>
#include <infinitybatch/step/wrap.hpp>

#include <exception>

namespace infinitybatch::testing {
namespace {

/// Torch's C++ layer refuses a single sample; this one any number below `least`.
struct Picky : nn::Module {
  explicit Picky(int64_t least) : least(least) {
    torch::manual_seed(3);
    body = register_module("body", nn::Linear(4, 256));
    norm = register_module("norm", nn::BatchNorm1d(256));
    head = register_module("head", nn::Linear(256, 2));
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor wide = body(x).tanh();
    TORCH_CHECK(x.size(0) >= least, "at least ", least);
    return head(least > 0 ? wide : norm(wide));
  }
  int64_t least;
  nn::Linear body{nullptr}, head{nullptr};
  nn::BatchNorm1d norm{nullptr};
};

Options of_budget(int64_t bytes) {
  Options options;
  options.memory_budget = bytes;
  return options;
}

class FewRows : public ::testing::TestWithParam<int64_t> {};

TEST_P(FewRows, TheWholeBatchIsTried) {
  const auto net = std::make_shared<Picky>(GetParam());
  const auto twin = std::make_shared<Picky>(GetParam());
  VirtualBatch batch(net, losses::mse(), of_budget(64 << 20));
  for (int step = 0; step < 3; ++step) {
    const at::Tensor x = at::randn({9, 4}, at::kDouble), y = at::randn({9, 2}, at::kDouble);
    net->zero_grad();
    twin->zero_grad();
    batch.backward(x, y);
    at::mse_loss(twin->forward(x), y).backward();
    for (size_t i = 0; i < net->parameters().size(); ++i) {
      const at::Tensor& wanted = twin->parameters()[i].grad();
      if (!wanted.defined()) continue;
      const at::Tensor off = net->parameters()[i].grad() - wanted;
      EXPECT_LT(off.norm().item<double>(), 1e-11) << i;
    }
    const at::Tensor statistics = net->norm->running_mean - twin->norm->running_mean;
    EXPECT_LT(statistics.norm().item<double>(), 1e-12);
  }
}

INSTANTIATE_TEST_SUITE_P(Least, FewRows, ::testing::Values(0, 3, 9));

TEST(FewRowsThatFit, AreAnErrorWithItsCause) {
  const auto net = std::make_shared<Picky>(90);
  const at::Tensor x = at::randn({100, 4}, at::kDouble), y = at::randn({100, 2}, at::kDouble);
  VirtualBatch batch(net, losses::mse(), of_budget(memory::stats(at::kCPU).live + (300 << 10)));
  try {
    batch.backward(x, y);
    FAIL() << "it fits";
  } catch (const BudgetExceeded& error) {
    EXPECT_NE(std::string(error.what_without_backtrace()).find("of the 100 samples (at least 90"),
              std::string::npos)
        << error.what_without_backtrace();
    EXPECT_THROW(std::rethrow_if_nested(error), c10::Error);
  }
}

}  // namespace
}  // namespace infinitybatch::testing
