#pragma once

#include <infinitybatch/execute/checkpoints.hpp>

#include <cstdint>
#include <optional>
#include <vector>

namespace infinitybatch {

/// Chooses where the tape of a micro-batch whose graph does not fit is cut.
///
/// A light recording tells what each op keeps. Cuts are looked for where little waits: of each
/// stretch of equal bytes the narrowest place. By dynamic programming over these, for a bound on
/// the graph of one segment, the cuts at which the least waits are found; the largest bound whose
/// peak is inside the budget wins, since fewer segments wait less and cost less. What the estimate
/// cannot know (workspace, gradients inside of a segment) is learned: a measured peak, or running
/// out of memory, corrects it. The problem is that of Feng and Huang, "Optimal Gradient
/// Checkpoint Search for Arbitrary Computation Graphs" (2018), on a line of ops.
class CheckpointPlanner : public Checkpoints {
 public:
  /// \param available bytes for everything but what is live before the micro-batch
  /// \param parked    what waits leaves the device, or is forgotten
  /// \param fixed     number of segments wished for; nothing: chosen by `available`
  void begin(int64_t available, bool parked, std::optional<int64_t> fixed = std::nullopt);

  std::vector<uint32_t> choose(const tape::Tape& tape) override;

  /// From now on nothing waits at the cuts; see `Checkpoints::forget`.
  void begin_forgetting();
  /// Plans smaller. False where the smallest segments have been tried.
  bool ran_out_of_memory();
  /// What a micro-batch took above what was live before it.
  void measured(int64_t bytes);

  /// Of the last choice, above what is live before the micro-batch.
  int64_t estimate() const noexcept { return estimate_; }
  int64_t segments() const noexcept { return segments_; }

 private:
  int64_t available_ = 0;
  bool parked_ = false;
  std::optional<int64_t> fixed_;
  double correction_ = 1.0;  // needed ÷ estimated
  bool smallest_ = false;    // the last choice was the smallest there is
  bool chosen_ = false;      // in the attempt at work
  int64_t estimate_ = 0;
  int64_t segments_ = 1;
};

}  // namespace infinitybatch
