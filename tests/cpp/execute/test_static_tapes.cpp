// A recording is used again once a second one was the same program, and no more once values have
// decided what forward does.
#include "execute/static_tapes.hpp"
#include "tape/recorder.hpp"

#include <infinitybatch/core/errors.hpp>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <vector>

namespace infinitybatch {
namespace {

Recorded recorded(int64_t rows, const std::function<at::Tensor(const at::Tensor&)>& forward) {
  const at::Tensor input = torch::randn({rows, 3});
  tape::Recorder recorder(Batch(input), {}, {at::kCPU});
  recorder.witness();
  const at::Tensor output = recorder.run([&] { return forward(input); });
  Recorded recorded;
  recorded.tape = recorder.finish(Batch(output));
  recorded.segments = tape::cut(recorded.tape, {});
  return recorded;
}

at::Tensor relu(const at::Tensor& x) {
  return at::relu(x);
}

TEST(StaticTapes, TheSecondRecordingOfAsManyRowsConfirmsTheFirst) {
  StaticTapes tapes;
  tapes.meet(4, recorded(4, relu));
  tapes.meet(2, recorded(2, relu));
  EXPECT_FALSE(tapes.knows(4));
  tapes.meet(4, recorded(4, relu));
  ASSERT_TRUE(tapes.knows(4));
  EXPECT_EQ(tapes.use(4)->tape.ops.size(), 1);
  EXPECT_FALSE(tapes.knows(2));
}

TEST(StaticTapes, AnotherProgramIsRefused) {
  StaticTapes tapes;
  tapes.meet(4, recorded(4, relu));
  EXPECT_THROW(tapes.meet(4, recorded(4, [](const at::Tensor& x) { return at::tanh(x); })),
               Unsupported);
  EXPECT_FALSE(tapes.knows(4));
}

TEST(StaticTapes, NothingIsUsedAgainOnceValuesDecide) {
  StaticTapes tapes;
  const StaticTapes copy = tapes;  // of the step before
  for (int i = 0; i < 2; ++i) tapes.meet(4, recorded(4, relu));
  ASSERT_TRUE(tapes.knows(4));
  tapes.distrust();
  for (int i = 0; i < 2; ++i) tapes.meet(4, recorded(4, relu));
  EXPECT_FALSE(tapes.knows(4));
  EXPECT_TRUE(*copy.varies);
}

at::Tensor tanh(const at::Tensor& x) {
  return at::tanh(x);
}

/// Two micro-batches in each of so many steps.
StaticTapes after(int steps) {
  StaticTapes tapes;
  for (int i = 0; i < steps; ++i) {
    for (int part = 0; part < 2; ++part) tapes.meet(4, recorded(4, relu));
    tapes.end_step();
  }
  return tapes;
}

TEST(StaticTapes, UserCodeRunsOnceInSteps1248) {
  std::vector<int64_t> due;
  StaticTapes tapes;
  for (int64_t step = 1; step < 20; ++step) {
    if (tapes.due()) due.push_back(step);
    tapes.compare(4, recorded(4, relu).tape);
    EXPECT_FALSE(tapes.due());
    tapes.end_step();
  }
  EXPECT_EQ(due, (std::vector<int64_t>{1, 2, 4, 8, 16}));
}

TEST(StaticTapes, AnotherProgramThanTheStepBeforeIsLearnedAnew) {
  StaticTapes tapes = after(1);
  tapes.compare(4, recorded(4, tanh).tape);
  EXPECT_FALSE(tapes.knows(4));
  for (int part = 0; part < 2; ++part) tapes.meet(4, recorded(4, tanh));
  EXPECT_FALSE(tapes.knows(4));  // it may be another one in each step
  tapes.end_step();
  tapes.meet(4, recorded(4, tanh));
  ASSERT_TRUE(tapes.knows(4));
  EXPECT_FALSE(*tapes.outdated);
}

TEST(StaticTapes, ProgramsThatAlternateAreRecordedInEachStep) {
  StaticTapes tapes = after(1);
  for (const auto& forward : {tanh, relu, tanh}) {
    tapes.compare(4, recorded(4, forward).tape);
    for (int part = 0; part < 2; ++part) tapes.meet(4, recorded(4, forward));
    EXPECT_FALSE(tapes.knows(4));
    tapes.end_step();
  }
  EXPECT_TRUE(*tapes.varies);
  EXPECT_FALSE(*tapes.outdated);
}

TEST(StaticTapes, WhatOtherNumbersOfRowsHaveUsedIsRefused) {
  StaticTapes tapes = after(1);
  tapes.meet(2, recorded(2, relu));
  tapes.end_step();
  ASSERT_NE(tapes.use(4), nullptr);
  EXPECT_THROW(tapes.meet(2, recorded(2, tanh)), Unsupported);
  EXPECT_FALSE(tapes.knows(4));
}

TEST(StaticTapes, AnotherProgramThanStepsHaveUsedIsRefusedOnce) {
  StaticTapes tapes = after(1);
  const StaticTapes copy = tapes;
  for (int i = 0; i < 2; ++i) {
    ASSERT_NE(tapes.use(4), nullptr);
    tapes.end_step();
  }
  EXPECT_THROW(tapes.compare(4, recorded(4, tanh).tape), Unsupported);
  EXPECT_TRUE(*copy.outdated);
  EXPECT_FALSE(tapes.knows(4));
}

}  // namespace
}  // namespace infinitybatch
