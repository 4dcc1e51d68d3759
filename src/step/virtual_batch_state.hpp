#pragma once

#include "coupled/draw_laws.hpp"
#include "execute/executor.hpp"
#include "execute/pass_times.hpp"
#include "offload/store.hpp"
#include "step/boundary_choice.hpp"
#include "step/programs.hpp"
#include "step/sorted_batch.hpp"
#include "step/step_answers.hpp"
#include "step/step_facts.hpp"
#include "step/ways.hpp"

#include <infinitybatch/step/virtual_batch.hpp>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace infinitybatch {

/// The steps of a VirtualBatch: attempts, until one succeeds.
class VirtualBatch::State {
 public:
  /// \throws InvalidArgument for options out of range, or that exclude each other
  State(Model model, Loss loss, Options options);

  /// `run_step` on rows that are sorted by length, where the options say so. Without `hand_out` it
  /// is a rehearsal: everything is as it was afterwards.
  StepReport step(const BatchSource& inputs, const BatchSource& targets, bool hand_out);

  Plan plan() const { return facts_.plan; }
  const std::optional<BatchDim>& batch_dim() const noexcept { return facts_.options.batch_dim; }
  const Loss& loss() const noexcept { return loss_; }

 private:
  StepReport run_step(const BatchSource& inputs, const BatchSource& targets, bool hand_out);
  StepReport attempt(const Setup& setup, const std::optional<int64_t>& budget, bool hand_out);
  Problem problem(const BatchSource& inputs, const BatchSource& targets);
  Programs::Identity program_of(const Problem& problem) const;
  /// What earlier steps have found to work for this kind of batch.
  Strategy first_strategy(const Problem& problem) const;
  /// What the strategy works with.
  void provide(Setup& setup);
  /// Those of this kind of batch; empty where parameters or buffers are other tensors now.
  StaticTapes* static_tapes(const Problem& problem);
  offload::Store* store(at::Device device);
  /// What the step offloaded, and how much of its copies was hidden, for plan and report.
  void tell_offload(const Setup& setup, StepReport& report);

  Model model_;
  Loss loss_;
  StepFacts facts_;
  Ways ways_{facts_};
  StepAnswers answers_{facts_};
  Programs programs_;
  std::unique_ptr<offload::Store> store_;
  PlainNumbers numbers_;              // of the model's, in Python
  SequenceInputs sequences_;          // with `trim`
  coupled::RenormedMemory renormed_;  // addresses: at worst a copy too many

  // Of the step at work:
  const SortedStep* sorted_ = nullptr;         // with `trim`
  int64_t own_peak_ = 0;                       // of the last attempt, without looks at rows
  offload::StoreStatistics offloaded_before_;  // when it began
  PassTimes times_;                            // of the last step, where it offloaded
  GraphBytes graph_bytes_;                     // the same
};

}  // namespace infinitybatch
