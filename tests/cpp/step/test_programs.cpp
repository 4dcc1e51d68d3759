// What was learned of a forward holds for one program: other modes bring another one, and buffers
// that count samples are no business of micro-batches.
#include "step/programs.hpp"
#include "step/support.hpp"

#include <infinitybatch/step/wrap.hpp>

namespace infinitybatch::testing {
namespace {

struct Normed : nn::Module {
  Normed() {
    torch::manual_seed(3);
    body = register_module("body", nn::Linear(4, 6));
    norm = register_module("norm", nn::BatchNorm1d(6));
    head = register_module("head", nn::Linear(6, 2));
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) { return head(norm(body(x).tanh())); }
  nn::Linear body{nullptr}, head{nullptr};
  nn::BatchNorm1d norm{nullptr};
};

std::vector<at::Tensor> gradients_of(nn::Module& net) {
  std::vector<at::Tensor> gradients;
  for (at::Tensor& each : net.parameters()) {
    gradients.push_back(each.grad().clone());
    each.mutable_grad().reset();
  }
  return gradients;
}

void expect_close(const std::vector<at::Tensor>& found, const std::vector<at::Tensor>& wanted) {
  ASSERT_EQ(found.size(), wanted.size());
  for (size_t i = 0; i < found.size(); ++i) {
    EXPECT_LT((found[i] - wanted[i]).norm().item<double>(), 1e-12) << i;
  }
}

TEST(Programs, AModuleInAnotherModeIsRecordedAnew) {
  const auto net = std::make_shared<Normed>();
  const auto twin = std::make_shared<Normed>();
  Options options = of_size(4);
  options.static_graph = true;
  VirtualBatch batch(net, losses::mse(), options);
  for (int step = 0; step < 5; ++step) {
    if (step == 3) {
      net->norm->eval();
      twin->norm->eval();
    }
    const at::Tensor x = at::randn({8, 4}, at::kDouble), y = at::randn({8, 2}, at::kDouble);
    batch.backward(x, y);
    at::mse_loss(twin->forward(x), y).backward();
    expect_close(gradients_of(*net), gradients_of(*twin));
    expect_close({net->norm->running_mean}, {twin->norm->running_mean});
  }
}

TEST(Programs, AreNumbered) {
  Programs programs;
  const auto number = [&](uint64_t configuration, const std::string& arguments = "") {
    return programs.number({configuration, arguments});
  };
  const int64_t first = number(1);
  EXPECT_EQ(number(1), first);
  const int64_t second = number(2);
  EXPECT_NE(second, first);
  EXPECT_EQ(number(1), first);
  programs.left(3);
  EXPECT_EQ(number(3), first) << "forward itself has changed it";
  for (int i = 0; !programs.full(); ++i) number(1, std::to_string(i));
  programs.clear();
  const int64_t again = number(1);
  EXPECT_GT(again, second) << "no number is given twice";
}

TEST(Programs, WhatForwardLeavesIsTheSameProgramWithOtherArguments) {
  Programs programs;
  const int64_t plain = programs.number({1, "plain"});
  programs.left(2);
  const int64_t transposed = programs.number({2, "transposed"});
  EXPECT_NE(transposed, plain);
  programs.left(3);
  EXPECT_EQ(programs.number({3, "plain"}), plain);
  programs.left(4);
  EXPECT_EQ(programs.number({4, "transposed"}), transposed);
}

struct Counter : nn::Module {
  Counter() {
    linear = register_module("linear", nn::Linear(4, 2));
    seen = register_buffer("seen", at::zeros({}, at::kDouble));
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    seen.add_(counts ? x.size(0) : 1);
    return linear(x);
  }
  nn::Linear linear{nullptr};
  at::Tensor seen;
  bool counts = true;
};

TEST(Programs, ABufferThatCountsSamplesIsNamed) {
  const at::Tensor x = at::randn({6, 4}, at::kDouble), y = at::randn({6, 2}, at::kDouble);
  for (const bool counts : {true, false}) {
    for (const int64_t size : {3, 2, 1}) {
      const auto net = std::make_shared<Counter>();
      net->counts = counts;
      const auto step = [&] { VirtualBatch(net, losses::mse(), of_size(size)).backward(x, y); };
      if (!counts) {
        step();
      } else {
        EXPECT_THROW(step(), CouplingError) << size;
      }
      EXPECT_EQ(net->seen.item<double>(), counts ? 0 : 1);
      if (size == 1) continue;
      Options options;
      options.micro_batch_size = size;
      const auto call = [&] { Wrap(net, options).forward(x); };
      if (!counts) {
        call();
      } else {
        EXPECT_THROW(call(), CouplingError) << size;
      }
      EXPECT_EQ(net->seen.item<double>(), counts ? 0 : 2);
    }
  }
}

}  // namespace
}  // namespace infinitybatch::testing
