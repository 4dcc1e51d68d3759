#include "tape/recorder.hpp"

#include "support/thread_time.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdio>
#include <vector>

namespace infinitybatch::tape {
namespace {

constexpr int kOps = 2000;

/// Many ops on next to nothing, so that what surrounds them is what takes time.
at::Tensor forward(const at::Tensor& x, const at::Tensor& w) {
  at::Tensor y = x;
  for (int i = 0; i < kOps / 4; ++i) {
    y = (y * w).add(x, 0.5).relu();
    y = at::where(y > 0, y, w);
  }
  return y;
}
constexpr int kDispatched = kOps / 4 * 5;

template <typename Call>
double nanoseconds_each(Call&& call) {
  const double start = thread_nanoseconds();
  call();
  return (thread_nanoseconds() - start) / kDispatched;
}

std::unique_ptr<at::ObserverContext> nothing(const at::RecordFunction& /*op*/) {
  return nullptr;
}

// Printed for people; the bounds are loose, for machines on which other work runs.
TEST(TapeCost, OfRecordingAndReplaying) {
  const at::Tensor w = at::randn({4}).requires_grad_();
  const at::Tensor x = at::randn({4});
  std::vector<double> plain;
  std::vector<double> bare;
  std::vector<double> recording;
  std::vector<double> replaying;
  for (int round = 0; round < 15; ++round) {
    at::Tensor y;
    plain.push_back(nanoseconds_each([&] { y = forward(x, w); }));
    {
      const at::CallbackHandle handle = at::addThreadLocalCallback(
          at::RecordFunctionCallback(&nothing).needsInputs(true).needsOutputs(true).scopes(
              {at::RecordScope::FUNCTION}));
      bare.push_back(nanoseconds_each([&] { y = forward(x, w); }));
      at::removeCallback(handle);
    }
    Recorder recorder(Batch(x), {}, {at::kCPU});
    recording.push_back(nanoseconds_each([&] { y = recorder.run([&] { return forward(x, w); }); }));
    const Tape tape = recorder.finish(Batch(y));
    ASSERT_FALSE(tape.opaque) << *tape.opaque;
    ASSERT_EQ(tape.ops.size(), kDispatched);
    replaying.push_back(nanoseconds_each([&] { y = replay(tape, Batch(x)).tensor(); }));
  }
  const double native = least(plain);
  const double callback = least(bare) - native;
  const double recorded = least(recording) - native;
  const double replayed = least(replaying);
  std::printf(
      "ns for each op: plain %.0f, replayed %.0f; on top: bare callback %.0f, recorded %.0f "
      "(%.2f times)\n",
      native, replayed, callback, recorded, recorded / callback);
  EXPECT_LT(recorded, 6 * callback);
  EXPECT_LT(replayed, 5 * native);
}

}  // namespace
}  // namespace infinitybatch::tape
