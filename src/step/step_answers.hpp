#pragma once

#include "step/recovery.hpp"
#include "step/step_facts.hpp"

#include <infinitybatch/memory/limit.hpp>

#include <cstdint>
#include <exception>
#include <optional>
#include <string>

namespace infinitybatch {

/// What a VirtualBatch does about an attempt that has failed: the answers of `recovery_table`.
class StepAnswers {
 public:
  explicit StepAnswers(StepFacts& facts) : facts_(facts) {}

  void begin_step() { segments_changed_ = 0; }
  /// The exception at work has ended an attempt under `setup`, which is changed for the next one.
  /// Returns whether that is a restart.
  /// \throws what the user should see, where there is no answer
  bool answer(Setup& setup, const std::optional<int64_t>& budget, const memory::Limit* limit);

 private:
  bool respond(Setup& setup, const std::optional<int64_t>& budget, const memory::Limit* limit);
  Answers answers(Setup& setup, const std::optional<int64_t>& budget);
  bool begin_reruns(Setup& setup);
  bool follow_segments(Setup& setup);
  /// What other errors mean, where a step knows it.
  void raise_explained(const Setup& setup, const std::optional<int64_t>& budget);
  /// Makes the planner plan smaller.
  /// \throws BudgetExceeded, what the user should see, where it cannot
  void refuse_smaller(int64_t budget);
  bool plan_smaller(int64_t budget);
  bool begin_cuts(Setup& setup);
  bool end_cuts(Setup& setup);
  bool begin_whole_batch(const Setup& setup);
  /// Larger micro-batches, where a few samples were what forward failed on; false where not.
  bool begin_larger(const Setup& setup);
  /// From now on batches of this kind are computed so; false where they cannot be.
  bool begin_checkpoints(Setup& setup);
  /// No more: samples are coupled.
  void end_checkpoints(Setup& setup);
  /// They did not help: as if they had never begun. \throws BudgetExceeded
  /// \param what it is that does not fit
  [[noreturn]] void give_up_checkpoints(int64_t needed, int64_t budget, const std::string& what);
  /// From now on fewer boundary activations of the whole batch are kept; false where that does not
  /// help, or what waits may leave the device instead.
  bool begin_recompute(Setup& setup, const std::optional<int64_t>& budget);
  /// From now on what waits of batches of this kind leaves the device; false where it cannot.
  bool begin_offload(Setup& setup);
  /// What waits until a coupled loss is known does not, but is made again after it.
  bool begin_again(const Setup& setup, CheckpointPlanner& planner) const;
  /// The last rung, where nothing may be offloaded: frontiers are computed again instead.
  bool begin_forgetting(CheckpointPlanner& planner) const;
  /// From now on offloaded values are copied in turn; false where they were.
  bool begin_turns(const Setup& setup);

  StepFacts& facts_;
  Failed failed_;                // the attempt that is answered
  int64_t needed_ = 0;           // bytes, by it, where memory ran out
  int64_t with_gradients_ = 0;   // what is live behind it, and gradients of all parameters
  int segments_changed_ = 0;     // how often, in the step at work
  std::exception_ptr streamed_;  // why one sample does not fit as a whole
};

}  // namespace infinitybatch
