#include <infinitybatch/execute/simulator.hpp>

#include <algorithm>
#include <map>
#include <tuple>

namespace infinitybatch {

int64_t simulate_peak(const Plan& plan, const MicroBatchProfile& profile, int64_t baseline,
                      bool begun) {
  // Most micro-batches are alike: each distinct (operation, size, first) is told once.
  std::map<std::tuple<Operation, int64_t, bool>, MicroBatchProfile::Effect> known;
  int64_t live = begun ? baseline + profile.buffer_bytes() : baseline;
  int64_t peak = live;
  for (const Instruction& instruction : plan.instructions) {
    if (instruction.micro_batch < 0) continue;
    const int64_t size = plan.micro_batch_sizes[static_cast<size_t>(instruction.micro_batch)];
    const bool first = !begun && instruction.micro_batch == 0;
    const auto key = std::make_tuple(instruction.operation, size, first);
    auto found = known.find(key);
    if (found == known.end()) {
      found = known.emplace(key, profile.effect(instruction.operation, size, first)).first;
    }
    peak = std::max(peak, live + found->second.rise);
    live += found->second.net;
  }
  return peak;
}

}  // namespace infinitybatch
