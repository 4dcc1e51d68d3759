#pragma once

#include "memory/foreign_storage.hpp"
#include "memory/high_water.hpp"
#include "step/recovery.hpp"
#include "step/waiting_calls.hpp"
#include "step/wrap_budget.hpp"
#include "step/wrap_forward.hpp"

#include <infinitybatch/memory/limit.hpp>

#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>

namespace infinitybatch {

/// One call of a wrapped model's forward, until an attempt succeeds.
class ForwardCall {
 public:
  ForwardCall(const std::shared_ptr<Wrapped>& wrapped, Setup setup, const Batch& inputs);

  Batch run();

 private:
  Planner& planner() {
    return with_gradients_ ? wrapped_->planners[planner_] : wrapped_->without_gradients;
  }
  /// Of this kind of batch. With a budget one thread at a time is here.
  KnownMemory& memory() {
    const std::lock_guard<std::mutex> lock(wrapped_->mutex);
    return wrapped_->known.memory_of(kind_);
  }
  Request request() const;
  /// What is live, and what gradients of all parameters will take.
  int64_t live_with_gradients() const;
  /// Attempts until one succeeds.
  Batch run_attempts();
  Batch attempt(std::optional<memory::Limit>& limit);
  void choose_store();
  /// Fewer boundary activations of the whole batch are kept from now on; false where that does not
  /// help, or they may be offloaded instead.
  bool begin_recompute();
  bool begin_offload();
  /// Under a plan: whether graphs that wait away from the device are an alternative.
  bool may_offload_graphs() const {
    return setup_.strategy.offloads() && !setup_.strategy.is_cut() && !options_.micro_batch_size;
  }
  /// Under a plan: see `BoundaryChoice::choose`.
  bool choose_boundaries();
  void choose_graphs();
  bool give_up_graphs();
  void forget_error_of_few_rows() {
    const std::lock_guard<std::mutex> lock(wrapped_->mutex);
    wrapped_->known.of(kind_).few_rows.forget_error();
  }
  bool answer(const memory::Limit* limit);
  Answers answers();
  bool look_less();
  bool follow_segments();
  bool make_others_go_forward_again();
  bool begin_cuts();
  bool end_cuts();
  bool begin_whole_batch();
  /// Larger micro-batches, where a few samples were what forward failed on; false where not.
  bool begin_larger();
  /// Memory ran out with a given size, and not at the budget: no plan is an answer.
  bool is_given_to_the_system() const { return options_.micro_batch_size && !refused_; }
  bool plan_smaller();
  void refuse_smaller();
  void rehearse();
  Split choose();
  Split split() const {
    Split split{piece_.plan.micro_batch_sizes, piece_.plan.retained, piece_.plan.overlaps};
    if (setup_.strategy.is_cut()) split.segments = piece_.plan.segments;
    return split;
  }
  Batch without_gradients(ForwardPass& pass);

  const std::shared_ptr<Wrapped> wrapped_;
  const Options& options_;
  std::shared_ptr<offload::Store> store_;  // the step's
  const Batch& inputs_;
  const BatchSource rows_;
  const BatchSource targets_;
  Setup setup_;
  BatchKind kind_;
  Findings findings_;  // of rehearsals
  const bool with_gradients_;
  std::optional<int64_t> budget_;  // in bytes
  // With a budget:
  std::optional<Planning> planning_;
  std::optional<memory::HighWater> high_water_;
  std::unique_ptr<memory::ForeignStorages> counted_;
  size_t planner_ = 0;
  Piece piece_;
  bool planned_ = false;    // the planner knows of the attempt at work
  bool rehearsed_ = false;  // this attempt or one before it
  bool finishing_ = false;  // the last attempt failed while outputs were joined
  const int64_t before_ = WaitingCalls::count();  // that wait for their backward
  int64_t restarts_ = 0;
  int64_t failed_rows_ = 0;  // see `FewestRows`; of the last attempt
  const Rerunnable rerunnable_;
  bool saw_coupling_ = false;    // the last attempt, of ops or draws
  bool uncut_ = false;           // tapes cannot be cut, or need not be
  int changes_ = 0;              // of the number of segments
  Failed failed_;                // the attempt that is answered
  int64_t needed_ = 0;           // bytes, by it, where memory ran out
  bool refused_ = false;         // then: by the limit, and not by the system
  std::exception_ptr coupling_;  // why only the whole batch as one micro-batch is exact
};

}  // namespace infinitybatch
