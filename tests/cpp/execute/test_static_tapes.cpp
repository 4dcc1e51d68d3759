// A recording is used again once a second one was the same program, and no more once values have
// decided what forward does.
#include "execute/static_tapes.hpp"
#include "tape/recorder.hpp"

#include <infinitybatch/core/errors.hpp>

#include <gtest/gtest.h>
#include <torch/torch.h>

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
  EXPECT_EQ(tapes.confirmed(4), nullptr);
  tapes.meet(4, recorded(4, relu));
  ASSERT_NE(tapes.confirmed(4), nullptr);
  EXPECT_EQ(tapes.confirmed(4)->tape.ops.size(), 1);
  EXPECT_EQ(tapes.confirmed(2), nullptr);
}

TEST(StaticTapes, AnotherProgramIsRefused) {
  StaticTapes tapes;
  tapes.meet(4, recorded(4, relu));
  EXPECT_THROW(tapes.meet(4, recorded(4, [](const at::Tensor& x) { return at::tanh(x); })),
               Unsupported);
  EXPECT_EQ(tapes.confirmed(4), nullptr);
}

TEST(StaticTapes, NothingIsUsedAgainOnceValuesDecide) {
  StaticTapes tapes;
  const StaticTapes copy = tapes;  // of the step before
  for (int i = 0; i < 2; ++i) tapes.meet(4, recorded(4, relu));
  ASSERT_NE(tapes.confirmed(4), nullptr);
  tapes.distrust();
  for (int i = 0; i < 2; ++i) tapes.meet(4, recorded(4, relu));
  EXPECT_EQ(tapes.confirmed(4), nullptr);
  EXPECT_TRUE(*copy.varies);
}

}  // namespace
}  // namespace infinitybatch
