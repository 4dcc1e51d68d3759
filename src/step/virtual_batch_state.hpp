#pragma once

#include "coupled/draw_laws.hpp"
#include "execute/executor.hpp"
#include "execute/pass_times.hpp"
#include "offload/store.hpp"
#include "plan/planner.hpp"
#include "step/graph_choice.hpp"
#include "step/knowledge.hpp"
#include "step/programs.hpp"
#include "step/recovery.hpp"
#include "step/sorted_batch.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/memory/limit.hpp>
#include <infinitybatch/step/virtual_batch.hpp>

#include <array>
#include <exception>
#include <memory>
#include <string>

namespace infinitybatch {

/// What a VirtualBatch knows between steps, and what it does in one. The step itself, and what
/// answers its failures, stand in virtual_batch.cpp; the ways that a step can go, one function
/// each, in ways.cpp; what options may be, in options.cpp.
class VirtualBatch::State {
 public:
  /// \throws InvalidArgument for options out of range, or that exclude each other
  State(Model model, Loss loss, Options options);

  /// `run_step` on rows that are sorted by length, where the options say so. Without `hand_out` it
  /// is a rehearsal: everything is as it was afterwards.
  StepReport step(const BatchSource& inputs, const BatchSource& targets, bool hand_out);
  /// One step.
  StepReport run_step(const BatchSource& inputs, const BatchSource& targets, bool hand_out);

  Plan plan() const { return plan_; }
  const std::optional<BatchDim>& batch_dim() const noexcept { return options_.batch_dim; }

 private:
  Problem problem(const BatchSource& inputs, const BatchSource& targets);
  Strategy first_strategy(const Problem& problem) const;
  void provide(Setup& setup);
  /// Sizes of micro-batches of a fixed size.
  std::vector<int64_t> fixed_sizes(const Setup& setup, int64_t rows, bool for_cuts) const;
  /// Those of this kind of batch; empty where parameters or buffers are other tensors now.
  StaticTapes* static_tapes(const Problem& problem);
  std::string program_of(const Problem& problem) const;
  StepReport attempt(const Setup& setup, const std::optional<int64_t>& budget, bool hand_out);
  /// Records, and then follows the plan that the recordings ask for.
  void follow_cuts(Executor& executor, const Setup& setup, std::vector<int64_t> sizes,
                   bool hand_out);
  void follow_fixed_size(Executor& executor, const Setup& setup, bool hand_out, StepReport& report);
  /// Measures what the planner still wants to know of a coupled loss's micro-batches, and undoes
  /// it.
  void rehearse(const Setup& setup, int64_t budget);
  /// Whether graphs are offloaded by choice.
  bool offloads_graphs() const;
  void choose_offload(Strategy& strategy) const;
  /// Of a coupled loss that offloads, once it is rehearsed: finds out whether offloading all graphs
  /// takes less time than second forwards.
  void choose_graphs(const Setup& setup, int64_t budget);
  /// From now on second forwards instead; false where no graph was offloaded by choice.
  bool give_up_graphs();
  /// With a fixed size: whether micro-batches keep their graph for a coupled loss.
  bool keeps_graphs(const Problem& problem, const Strategy& strategy) const;
  Request request(const Setup& setup, int64_t budget) const;
  void follow_planner(Executor& executor, const Setup& setup, int64_t budget, bool hand_out,
                      StepReport& report);
  /// Micro-batch by micro-batch, each of them segment by segment; or, where ops see the whole
  /// batch, so from one of them to the next.
  void follow_checkpoints(Executor& executor, const Setup& setup,
                          const std::optional<int64_t>& budget, bool hand_out, StepReport& report);
  /// An attempt has thrown `failed_`. Returns whether the next one is a restart.
  /// \throws what the user should see, where there is no answer
  bool answer(Setup& setup, const std::optional<int64_t>& budget, const memory::Limit* limit);
  Answers answers(Setup& setup, const std::optional<int64_t>& budget);
  bool begin_reruns(Setup& setup);
  bool follow_segments(Setup& setup);
  void raise_explained(const Setup& setup, const std::optional<int64_t>& budget);
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
  bool keep_fewer_boundaries(Setup& setup, int64_t budget) const;
  void keep_all_boundaries(Setup& setup);
  /// Of what is offloaded because it does not fit, once that is rehearsed: finds out whether
  /// keeping some of it and computing the rest again takes less time.
  void choose_boundaries(Setup& setup, int64_t budget);
  std::optional<double> rehearse_fewer(Setup& setup, int64_t budget);
  /// \param rows of the micro-batch that an executor has recorded
  void learn_boundaries(const Executor& executor, const Setup& setup, Rows rows);
  /// From now on what waits of batches of this kind leaves the device; false where it cannot.
  bool begin_offload(Setup& setup);
  /// What waits until a coupled loss is known does not, but is made again after it.
  bool begin_again(const Setup& setup, CheckpointPlanner& planner) const;
  /// The last rung, where nothing may be offloaded: frontiers are computed again instead.
  bool begin_forgetting(CheckpointPlanner& planner) const;
  /// What the step offloaded, and how much of its copies was hidden, for plan and report.
  void tell_offload(const Setup& setup, StepReport& report);
  /// With a fixed size: whether offloaded values may be copied while other micro-batches compute.
  bool may_overlap(const Setup& setup) const;
  /// From now on they are copied in turn; false where they were.
  bool begin_turns(const Setup& setup);
  offload::Store* store(at::Device device);
  /// \throws Unsupported where forward has to run again on inputs that it has changed
  void check_inputs() const;

  Model model_;
  bool has_penalty() const {
    const auto* separable = std::get_if<SeparableLoss>(&loss_);
    return separable != nullptr && separable->has_penalty();
  }

  Loss loss_;
  Options options_;
  Planner planner_;
  Plan plan_;
  PassTimes times_;                            // of the last step, where it offloaded
  GraphBytes graph_bytes_;                     // the same
  offload::StoreStatistics offloaded_before_;  // when it began
  GraphChoices graph_choices_;
  bool use_tapes_ = true;
  std::array<bool, 2> cut_{};    // in eval, in training: ops of the model see the whole batch
  bool inputs_written_ = false;  // by forward, in the last attempt
  Programs programs_;
  KnowledgeBase known_;
  const SortedStep* sorted_ = nullptr;  // of the step at work, with `trim`
  BatchKind kind_;                      // of the step at work
  Knowledge* knowledge_ = nullptr;      // of that kind
  KnownMemory* memory_ = nullptr;       // the same
  std::unique_ptr<offload::Store> store_;
  PlainNumbers numbers_;                   // of the model's, in Python
  coupled::RenormedMemory renormed_;       // addresses: at worst a copy too many
  int64_t segments_ = 1;                   // of the cut tapes that were recorded last
  Failed failed_;                          // the attempt that is answered
  int64_t needed_ = 0;                     // bytes, by it, where memory ran out
  int segments_changed_ = 0;               // how often, in the step at work
  int64_t failed_rows_ = 0;                // see `Executor::failed_rows`
  bool failed_in_loss_ = false;            // the last attempt, in the loss of all outputs
  bool coupled_beyond_cuts_ = false;       // of the last attempt: no cut helps
  std::optional<std::string> collective_;  // by which an attempt's loss talked to other ranks
  bool planning_ = false;                  // the planner knows of the attempt at work
  bool beside_plan_ = false;               // the step at work ran what is no part of its plan
  int64_t own_peak_ = 0;                   // of the last attempt, without that
  std::exception_ptr streamed_;            // why one sample does not fit as a whole
};

}  // namespace infinitybatch
