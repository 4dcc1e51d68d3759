// Sinks: gradients of many graphs added up out of sight, handed out once.
#include "autograd/engine.hpp"
#include "autograd/gradient_sinks.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/memory/statistics.hpp>

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace infinitybatch::autograd {
namespace {

at::Tensor leaf(std::vector<int64_t> shape = {3}) {
  return at::ones(shape, at::kDouble).requires_grad_();
}

std::vector<NamedParameter> named(const std::vector<at::Tensor>& tensors) {
  std::vector<NamedParameter> result;
  for (size_t i = 0; i < tensors.size(); ++i) {
    result.push_back({"p" + std::to_string(i), tensors[i]});
  }
  return result;
}

void backward(const at::Tensor& root) {
  run_backward({root}, {at::ones_like(root)});
}

TEST(Sinks, KeepGradientsOutOfSightUntilTheHandOut) {
  const at::Tensor w = leaf();
  GradientSinks sinks(named({w}));
  backward((w * 2).sum());
  backward((w * w).sum());
  EXPECT_FALSE(w.grad().defined());
  EXPECT_EQ(sinks.bytes(), 24);
  sinks.hand_out();
  EXPECT_TRUE(w.grad().equal(at::full({3}, 4.0, at::kDouble)));
  EXPECT_EQ(sinks.bytes(), 0);
}

TEST(Sinks, DropTheirSumsUnlessTheyAreHandedOut) {
  const at::Tensor w = leaf({1000});
  const int64_t before = memory::stats(at::kCPU).live;
  {
    GradientSinks sinks(named({w}));
    backward((w * 2).sum());
    EXPECT_GT(memory::stats(at::kCPU).live, before);
  }
  EXPECT_FALSE(w.grad().defined());
  EXPECT_EQ(memory::stats(at::kCPU).live, before);
}

TEST(Sinks, GiveTheParametersTheirOwnWayBack) {
  const at::Tensor w = leaf();
  const auto accumulator = torch::autograd::impl::grad_accumulator(w);
  {
    GradientSinks sinks(named({w}));
    EXPECT_FALSE(torch::autograd::impl::try_get_grad_accumulator(w).get() == accumulator.get());
  }
  EXPECT_TRUE(torch::autograd::impl::try_get_grad_accumulator(w).get() == accumulator.get());
  (w * 3).sum().backward();
  EXPECT_TRUE(w.grad().equal(at::full({3}, 3.0, at::kDouble)));
}

TEST(Sinks, TakeAFirstGradientOverWithoutACopy) {
  const at::Tensor w = leaf({1000});
  GradientSinks sinks(named({w}));
  const void* incoming = nullptr;
  const void* buffer = nullptr;
  int events = 0;
  sinks.watch([&](const SinkEvent& event) {
    if (events++ == 0) {
      incoming = event.gradient;
      buffer = event.buffer;
    }
    EXPECT_EQ(event.buffer, buffer) << "later ones are added in place";
    EXPECT_EQ(event.buffer_bytes, 8000);
  });
  backward((w * w).sum());
  backward((w * w).sum());
  EXPECT_EQ(events, 2);
  EXPECT_EQ(incoming, buffer);
  sinks.watch(nullptr);
  sinks.hand_out();
  EXPECT_EQ(w.grad().storage().data(), buffer) << "nor does handing out copy";
}

TEST(Sinks, NameTheParameterOfAStepThatRunsAlready) {
  const at::Tensor a = leaf(), b = leaf();
  GradientSinks first(named({a}));
  try {
    GradientSinks second(named({b, a}));
    FAIL();
  } catch (const StateError& error) {
    EXPECT_NE(std::string(error.what()).find("'p1'"), std::string::npos) << error.what();
  }
  // The refused ones gave back what they had taken.
  (b * 2).sum().backward();
  EXPECT_TRUE(b.grad().defined());
  backward((a * 2).sum());
  EXPECT_FALSE(a.grad().defined());
}

TEST(Sinks, TakeTiedWeightsOnce) {
  const at::Tensor w = leaf();
  GradientSinks sinks(named({w, w}));
  backward((w * w).sum());
  sinks.hand_out();
  EXPECT_TRUE(w.grad().equal(at::full({3}, 2.0, at::kDouble)));
}

TEST(Sinks, PassOverFrozenParameters) {
  const at::Tensor w = leaf(), frozen = at::ones({3}, at::kDouble);
  GradientSinks sinks(named({frozen, w}));
  backward((w * frozen).sum());
  sinks.hand_out();
  EXPECT_TRUE(w.grad().defined());
  EXPECT_FALSE(frozen.grad().defined());
}

TEST(Sinks, RedirectLeavesThatNobodyListed) {
  const at::Tensor w = leaf(), other = leaf(), direct = leaf({});
  GradientSinks sinks(named({w}));
  for (int i = 0; i < 2; ++i) {
    const at::Tensor root = ((w + other) * other).sum() * direct;
    sinks.redirect_other_leaves({root});
    backward(root);
  }
  EXPECT_FALSE(other.grad().defined());
  sinks.hand_out();
  EXPECT_TRUE(other.grad().equal(at::full({3}, 6.0, at::kDouble)));
  EXPECT_EQ(direct.grad().item<double>(), 12.0);
}

TEST(Sinks, ForgetLeavesThatDied) {
  const at::Tensor w = leaf();
  GradientSinks sinks(named({w}));
  const int64_t before = memory::stats(at::kCPU).live;
  for (int i = 0; i < 5; ++i) {
    {
      const at::Tensor temporary = leaf({1000});
      const at::Tensor root = (temporary.sum() + w.sum());
      sinks.redirect_other_leaves({root});
      backward(root);
    }
    sinks.forget_dead_leaves();
  }
  EXPECT_LE(memory::stats(at::kCPU).live, before + 256) << "w's own buffer only";
  sinks.hand_out();
  EXPECT_TRUE(w.grad().equal(at::full({3}, 5.0, at::kDouble)));
}

TEST(Sinks, RefuseAGraphThatOutlivedItsStep) {
  const at::Tensor w = leaf();
  at::Tensor kept;
  {
    GradientSinks sinks(named({w}));
    kept = (w * 2).sum();
  }
  try {
    kept.backward();
    FAIL();
  } catch (const StateError& error) {
    EXPECT_NE(std::string(error.what()).find("one micro-batch"), std::string::npos);
  }
}

TEST(Sinks, AHookThatThrowsInTheHandOutLeavesGradAlone) {
  // Whichever leaf throws, others have been handed theirs already.
  for (size_t thrower = 0; thrower < 3; ++thrower) {
    const std::vector<at::Tensor> leaves{leaf(), leaf(), leaf()};
    const at::Tensor there = at::full({3}, 0.5, at::kDouble);
    leaves[0].mutable_grad() = there.clone();
    leaves[thrower].register_hook(
        [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("hook"); });
    const at::Tensor object = leaves[0].grad();
    GradientSinks sinks(named(leaves));
    backward((leaves[0] + leaves[1] + leaves[2]).sum());
    EXPECT_THROW(sinks.hand_out(), std::runtime_error);
    EXPECT_TRUE(leaves[0].grad().is_same(object)) << thrower;
    EXPECT_TRUE(leaves[0].grad().equal(there)) << thrower;
    EXPECT_FALSE(leaves[1].grad().defined()) << thrower;
    EXPECT_FALSE(leaves[2].grad().defined()) << thrower;
  }
}

TEST(Sinks, SumsOfSparseGradientsDoNotGrow) {
  const auto words = torch::nn::Embedding(torch::nn::EmbeddingOptions(10, 4).sparse(true));
  GradientSinks sinks(named({words->weight}));
  auto module = words;
  int64_t after_two = 0;
  for (int i = 0; i < 50; ++i) {
    backward(module(at::arange(10)).sum());
    if (i == 1) after_two = sinks.bytes();
  }
  EXPECT_EQ(sinks.bytes(), after_two);
  sinks.hand_out();
  EXPECT_TRUE(words->weight.grad().is_sparse());
  EXPECT_TRUE(words->weight.grad().to_dense().equal(at::full({10, 4}, 50.0)));
}

struct Fails : torch::autograd::Function<Fails> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    return x.view_as(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list) {
    throw std::runtime_error("in backward");
  }
};

TEST(Engine, HoldsNothingOfARunThatFailed) {
  const at::Tensor w = leaf({1000});
  const int64_t before = memory::stats(at::kCPU).live;
  for (int i = 0; i < 3; ++i) {
    GradientSinks sinks(named({w}));
    // Branches that are ready while the failing one runs stay in the engine's queue.
    at::Tensor sum = Fails::apply(w * 1.5).sum();
    for (int branch = 0; branch < 4; ++branch) sum = sum + (w * branch).exp().sum();
    EXPECT_THROW(run_backward({sum}, {at::ones_like(sum)}), std::runtime_error);
  }
  EXPECT_EQ(memory::stats(at::kCPU).live, before);
}

TEST(Engine, RunsBackwardWithoutAutocastAndPutsItBack) {
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const at::Tensor w = leaf();
  bool during = true;
  const at::Tensor doubled = w * 2;
  doubled.register_hook(
      [&](const at::Tensor&) { during = at::autocast::is_autocast_enabled(at::kCPU); });
  backward(doubled.sum());
  EXPECT_FALSE(during);
  EXPECT_TRUE(at::autocast::is_autocast_enabled(at::kCPU));
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
}

}  // namespace
}  // namespace infinitybatch::autograd
