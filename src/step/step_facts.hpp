#pragma once

#include "execute/setup.hpp"
#include "plan/planner.hpp"
#include "step/graph_choice.hpp"
#include "step/knowledge.hpp"

#include <infinitybatch/execute/plan.hpp>
#include <infinitybatch/step/options.hpp>

#include <array>
#include <cstdint>
#include <string>

namespace infinitybatch {

/// What the attempt at work, or the one that has just failed, has found out.
struct AttemptFacts {
  bool planning = false;             ///< the planner knows of it
  bool inputs_written = false;       ///< by forward
  bool failed_in_loss = false;       ///< in the loss of all outputs
  bool coupled_beyond_cuts = false;  ///< no cut helps
  bool state_as_before = false;      ///< what lies in plain attributes of the model
  int64_t failed_rows = 0;           ///< see `Executor::failed_rows`
};

/// What a VirtualBatch knows, between steps and in one: its ways to go (`Ways`) and its answers to
/// failures (`StepAnswers`) read it, and leave there what they have found.
struct StepFacts {
  const Options options;
  const bool penalty;         ///< the loss has one
  bool use_tapes = true;      ///< until a replay gave other outputs
  std::array<bool, 2> cut{};  ///< in eval, in training: ops of the model see the whole batch
  int64_t segments = 1;       ///< of the cut tapes that were recorded last
  Planner planner{};
  GraphChoices graph_choices{};
  KnowledgeBase known{};

  // Of the step at work:
  BatchKind kind{};
  Knowledge* knowledge = nullptr;  ///< of that kind
  KnownMemory* memory = nullptr;   ///< the same
  Plan plan{};
  bool beside_plan = false;  ///< it ran what is no part of its plan
  AttemptFacts attempt{};

  /// With a fixed size: whether micro-batches keep their graph for a coupled loss.
  bool keeps_graphs(const Problem& problem, const Strategy& strategy) const;
  /// The strategy keeps the boundary activations of the whole batch.
  void keep_all_boundaries(Setup& setup) const;
  /// \throws Unsupported where forward has to run again on inputs that it has changed
  void check_inputs() const;
};

}  // namespace infinitybatch
