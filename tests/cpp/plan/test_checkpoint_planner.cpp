// Where one sample is cut for memory: how often smaller segments are an answer.
#include "plan/checkpoint_planner.hpp"

#include "execute/light_recording.hpp"
#include "tape/recorder.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>

namespace infinitybatch {
namespace {

tape::Tape recorded(const std::function<at::Tensor(const at::Tensor&)>& forward) {
  const Batch inputs = Batch(at::randn({1, 6000}).requires_grad_());
  tape::Recorder recorder(inputs, {}, {at::Device(at::kCPU)});
  recorder.lighten(at::kCPU);
  const Batch outputs =
      run_lightly(recorder, [&] { return Batch(forward(inputs.leaves().front().tensor)); });
  tape::Tape tape = recorder.finish(outputs);
  EXPECT_FALSE(tape.opaque) << *tape.opaque;
  return tape;
}

at::Tensor deep(const at::Tensor& x) {
  at::Tensor h = x;
  for (int i = 0; i < 16; ++i) h = h.tanh();
  return h;
}

at::Tensor viewed(const at::Tensor& x) {
  return x.view({6, 1000});
}

CheckpointPlanner with_room(int64_t bytes) {
  CheckpointPlanner planner;
  CheckpointPlanner::Situation situation;
  situation.available = bytes;
  planner.begin(situation);
  return planner;
}

TEST(SmallerSegments, AreNoAnswerWhereForwardKeepsNothing) {
  CheckpointPlanner planner = with_room(1 << 20);
  planner.choose(recorded(viewed));
  EXPECT_FALSE(planner.ran_out_of_memory());
}

TEST(SmallerSegments, AreAnAnswerAsLongAsAnyProgramHasThem) {
  CheckpointPlanner planner = with_room(1 << 20);
  EXPECT_TRUE(planner.choose(recorded(deep)).empty()) << "all fits";
  planner.choose(recorded(viewed));
  EXPECT_TRUE(planner.ran_out_of_memory());
}

TEST(SmallerSegments, EndAfterFewAttempts) {
  CheckpointPlanner planner = with_room(1LL << 40);  // a million times what forward keeps
  CheckpointPlanner::Situation situation;
  situation.available = 1LL << 40;
  int attempts = 0;
  do {
    planner.begin(situation);
    planner.choose(recorded(deep));
    ASSERT_LT(++attempts, 20);
  } while (planner.ran_out_of_memory());
  EXPECT_GT(attempts, 3);
}

}  // namespace
}  // namespace infinitybatch
