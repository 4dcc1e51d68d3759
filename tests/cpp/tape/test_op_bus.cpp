#include "tape/op_bus.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

namespace infinitybatch::tape {
namespace {

/// Writes down what it is told.
struct Listener : OpListener {
  Listener(std::string name, std::vector<std::string>& heard, bool keeps = false)
      : name(std::move(name)), heard(heard), keeps(keeps) {}

  std::unique_ptr<OpContext> begin(const SeenOp& op) noexcept override {
    heard.push_back(name + " begins " + op.name());
    return keeps ? std::make_unique<OpContext>() : nullptr;
  }
  void end(const SeenOp& op, OpContext* context) noexcept override {
    const bool kept = context != nullptr && context->whose == this;
    heard.push_back(name + (kept ? " ends its " : " ends ") + op.name());
    results = op.outputs().size();
  }

  std::string name;
  std::vector<std::string>& heard;
  bool keeps;
  size_t results = 0;
};

struct Other final : Listener {
  using Listener::Listener;
};

using Lines = std::vector<std::string>;

TEST(OpBus, TellsInTheOrderInWhichListenersCame) {
  Lines heard;
  Listener first("first", heard, /*keeps=*/true);
  Other second("second", heard);
  const at::Tensor tensor = torch::ones({2});
  {
    const OpBus::Scope outer(first);
    const OpBus::Scope inner(second, {.results = true});
    (void)tensor.neg();
  }
  (void)tensor.neg();  // nobody listens any more
  EXPECT_EQ(heard, (Lines{"first begins aten::neg", "second begins aten::neg",
                          "first ends its aten::neg", "second ends aten::neg"}));
  EXPECT_EQ(second.results, 1U);
}

TEST(OpBus, OfOneTypeTheLastOneAloneHears) {
  Lines heard;
  Listener outer("outer", heard);
  Listener inner("inner", heard);
  const at::Tensor tensor = torch::ones({2});
  const OpBus::Scope listening(outer);
  {
    const OpBus::Scope again(inner);
    EXPECT_EQ(OpBus::listener<Listener>(), &inner);
    (void)tensor.neg();
  }
  EXPECT_EQ(OpBus::listener<Listener>(), &outer);
  EXPECT_EQ(OpBus::listener<Other>(), nullptr);
  (void)tensor.neg();
  EXPECT_EQ(heard, (Lines{"inner begins aten::neg", "outer begins aten::neg"}));
}

TEST(OpBus, BackwardPassesAreForThoseWhoAsk) {
  Lines heard;
  Lines heard_too;
  Listener forward("forward", heard);
  Other backward("backward", heard_too);
  const at::Tensor tensor = torch::ones({2}, torch::requires_grad());
  const at::Tensor sum = tensor.sum();
  {
    const OpBus::Scope outer(forward);
    const OpBus::Scope inner(backward, {.backward = true});
    sum.backward();
  }
  EXPECT_EQ(std::count(heard.begin(), heard.end(), "forward begins SumBackward0"), 0);
  EXPECT_EQ(std::count(heard_too.begin(), heard_too.end(), "backward begins SumBackward0"), 1);
}

TEST(OpBus, ListenersInsideOfABackwardPassLeaveNothingBehind) {
  Lines heard;
  Lines heard_inside;
  Listener outer("outer", heard);
  const at::Tensor tensor = torch::ones({2}, torch::requires_grad());
  const at::Tensor twice = tensor * 2;
  twice.register_hook([&](const at::Tensor&) {
    Other inner("inner", heard_inside);
    const OpBus::Scope listening(inner, {.results = true});
    (void)torch::ones({1}).neg();
  });
  {
    const OpBus::Scope listening(outer);
    twice.sum().backward();
    heard.clear();
    (void)torch::ones({1}).neg();
    EXPECT_EQ(std::count(heard.begin(), heard.end(), "outer begins aten::neg"), 1);
  }
  heard.clear();
  (void)torch::ones({1}).neg();
  EXPECT_TRUE(heard.empty());
  EXPECT_EQ(std::count(heard_inside.begin(), heard_inside.end(), "inner ends aten::neg"), 1);
}

TEST(OpBus, AnOpThatBeganBeforeAListenerCameEndsWithoutIt) {
  Lines heard;
  Listener early("early", heard, /*keeps=*/true);
  Other late("late", heard, /*keeps=*/true);
  const OpBus::Scope listening(early);
  {
    RECORD_FUNCTION("a region", std::vector<c10::IValue>());
    const OpBus::Scope inner(late, {.results = true});
    (void)torch::ones({2}).neg();
  }
  EXPECT_EQ(std::count(heard.begin(), heard.end(), "late ends its a region"), 0);
  EXPECT_EQ(std::count(heard.begin(), heard.end(), "early ends its a region"), 1);
}

}  // namespace
}  // namespace infinitybatch::tape
