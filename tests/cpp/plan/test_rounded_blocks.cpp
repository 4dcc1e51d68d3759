// The planner where blocks are rounded, as the caching allocators of accelerators do: at two and
// four samples a block that grows by a few bytes a sample looks as if it stood still.
#include "plan/planner.hpp"

#include <gtest/gtest.h>

#include <algorithm>

namespace infinitybatch {
namespace {

constexpr int64_t kBlockBytes = 512;
constexpr int64_t kRows = 20'000;
constexpr int64_t kLive = 4096;

int64_t in_blocks(int64_t bytes) {
  return (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
}

/// Activations of `bytes_per_sample`, and a gradient of one block that is added to its buffer.
struct RoundingDevice {
  int64_t bytes_per_sample;
  int restarts = 0;
  int64_t largest = 0;  // of the last step

  MicroBatchTrace trace(int64_t size, bool first) const {
    static const char memory[4] = {};
    const auto at = [&](int i) { return static_cast<const void*>(memory + i); };
    MicroBatchTrace trace;
    trace.size = size;
    const auto starts = [&] { trace.operation_starts.push_back(trace.events.size()); };
    const int64_t activations = in_blocks(bytes_per_sample * size);
    starts();  // load
    starts();  // forward
    trace.events.push_back({at(0), activations});
    starts();  // loss
    starts();  // backward
    trace.events.push_back({at(2), kBlockBytes});
    trace.sinks.push_back({trace.events.size(), {at(2), first ? at(2) : at(3), kBlockBytes}});
    if (!first) trace.events.push_back({at(2), -kBlockBytes});
    trace.events.push_back({at(0), -activations});
    starts();  // free
    return trace;
  }

  int64_t peak(int64_t size) const {
    return kLive + in_blocks(bytes_per_sample * size) + 2 * kBlockBytes;
  }

  void step(Planner& planner, const Request& request) {
    planner.begin(request);
    largest = 0;
    while (const auto piece = planner.next()) {
      Measurement measured;
      measured.peak_bytes = kLive;
      for (const int64_t size : piece->plan.micro_batch_sizes) {
        measured.peak_bytes = std::max(measured.peak_bytes, peak(size));
        measured.seconds.push_back(1e-3 + 1e-6 * static_cast<double>(size));
        if (piece->trace) measured.trace = trace(size, largest == 0);
        largest = std::max(largest, size);
      }
      if (measured.peak_bytes > request.budget_bytes) {
        ++restarts;
        planner.ran_out_of_memory(measured.peak_bytes);
        planner.begin(request);
        largest = 0;
        continue;
      }
      planner.observe(*piece, measured);
    }
  }
};

TEST(RoundedBlocks, DoNotHideThatMemoryGrows) {
  for (const int64_t bytes_per_sample : {4, 16, 100}) {
    for (const int64_t room : {20'000, 100'000}) {
      SCOPED_TRACE(std::to_string(bytes_per_sample) + " bytes a sample, " + std::to_string(room));
      Planner planner;
      RoundingDevice device{bytes_per_sample};
      Request request;
      request.signature = "sample";
      request.batch_size = kRows;
      request.baseline_bytes = kLive;
      request.budget_bytes = kLive + room;
      request.measured = true;
      for (int i = 0; i < 20; ++i) device.step(planner, request);
      EXPECT_EQ(device.restarts, 0) << "a size that does not fit was tried";
      const int64_t fits = std::min(kRows, (room - 2 * kBlockBytes) / bytes_per_sample);
      EXPECT_GE(device.largest, fits / 2) << "rounding was taken for memory of the samples";
    }
  }
}

}  // namespace
}  // namespace infinitybatch
