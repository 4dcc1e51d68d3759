// What C++ code does that no dispatched op tells of.
#include "tape/recorder.hpp"

#include <infinitybatch/core/errors.hpp>

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace infinitybatch::tape {
namespace {

struct StraightThrough : torch::autograd::Function<StraightThrough> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& x) {
    return x.round();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 torch::autograd::variable_list gradients) {
    return gradients;
  }
};

struct AddsOne : torch::autograd::Function<AddsOne> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor x) {
    x.add_(1);
    context->mark_dirty({x});
    return x;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 torch::autograd::variable_list gradients) {
    return {gradients[0] * 7};
  }
};

template <typename Forward>
Tape record(const at::Tensor& x, Forward&& forward) {
  Recorder recorder(Batch(x), {}, {at::kCPU});
  const Batch outputs = recorder.run([&] { return Batch(forward(x)); });
  return recorder.finish(outputs);
}

const at::TensorOptions kDouble = at::TensorOptions().dtype(at::kDouble);

TEST(TapeFunctions, AStraightThroughEstimatorIsNoticed) {
  const at::Tensor w = at::randn({3}, kDouble).requires_grad_();
  const Tape tape = record(at::randn({4, 3}, kDouble),
                           [&](const at::Tensor& x) { return StraightThrough::apply(x * w) * 2; });
  ASSERT_TRUE(tape.opaque);
  EXPECT_NE(tape.opaque->find("graph node"), std::string::npos) << *tape.opaque;
  EXPECT_FALSE(tape.refusal);
  EXPECT_THROW(replay(tape, Batch(at::randn({4, 3}, kDouble))), Unsupported);
}

TEST(TapeFunctions, AsTheLastThingOfForwardToo) {
  const at::Tensor w = at::randn({3}, kDouble).requires_grad_();
  const Tape tape = record(at::randn({4, 3}, kDouble),
                           [&](const at::Tensor& x) { return StraightThrough::apply(x * w); });
  ASSERT_TRUE(tape.opaque);
}

TEST(TapeFunctions, OneThatWorksInPlaceIsNoticed) {
  const at::Tensor w = at::randn({3}, kDouble).requires_grad_();
  const Tape tape = record(at::randn({4, 3}, kDouble), [&](const at::Tensor& x) {
    const at::Tensor y = x * w;
    AddsOne::apply(y);
    return y * 2;
  });
  ASSERT_TRUE(tape.opaque);
}

TEST(TapeFunctions, UnderNoGradItsOpsReplay) {
  const at::NoGradGuard no_grad;
  const at::Tensor w = at::randn({3}, kDouble);
  const at::Tensor x = at::randn({4, 3}, kDouble);
  const Tape tape =
      record(x, [&](const at::Tensor& given) { return StraightThrough::apply(given * w) * 2; });
  ASSERT_FALSE(tape.opaque) << *tape.opaque;
  EXPECT_TRUE(at::equal(replay(tape, Batch(x)).tensor(), (x * w).round() * 2));
}

TEST(TapeFunctions, AHookIsNoticed) {
  const at::Tensor w = at::randn({3}, kDouble).requires_grad_();
  const Tape tape = record(at::randn({4, 3}, kDouble), [&](const at::Tensor& x) {
    const at::Tensor y = x * w;
    y.register_hook([](const at::Tensor& gradient) { return gradient * 2; });
    return y * 2;
  });
  ASSERT_TRUE(tape.opaque);
  EXPECT_NE(tape.opaque->find("hook"), std::string::npos) << *tape.opaque;
}

TEST(TapeFunctions, WritingPastTheDispatcherMakesAConstant) {
  const at::Tensor w = at::randn({3}, kDouble).requires_grad_();
  const at::Tensor x = at::randn({3}, kDouble);
  at::Tensor recorded;
  const Tape tape = record(x, [&](const at::Tensor& given) {
    const at::Tensor mask = at::empty({3}, kDouble);
    for (int i = 0; i < 3; ++i) mask.mutable_data_ptr<double>()[i] = i;
    return recorded = given * mask * w;
  });
  ASSERT_FALSE(tape.opaque) << *tape.opaque;
  EXPECT_TRUE(tape.host_read);
  const at::Tensor again = replay(tape, Batch(x)).tensor();
  EXPECT_TRUE(at::equal(again, recorded));
  again.sum().backward();
  const at::Tensor replayed = w.grad().clone();
  w.mutable_grad().zero_();
  recorded.sum().backward();
  EXPECT_TRUE(at::equal(replayed, w.grad()));
}

TEST(TapeFunctions, ReplaysMayRunInAnyMode) {
  const at::Tensor w = at::randn({3}, kDouble).requires_grad_();
  const at::Tensor x = at::randn({3}, kDouble);
  const Tape tape = record(x, [&](const at::Tensor& given) { return given * w; });
  const at::NoGradGuard no_grad;
  EXPECT_TRUE(replay(tape, Batch(x)).tensor().requires_grad());
  EXPECT_FALSE(at::GradMode::is_enabled());
}

}  // namespace
}  // namespace infinitybatch::tape
