#pragma once

#include "core/row_range.hpp"
#include "plan/planner.hpp"
#include "step/graph_choice.hpp"
#include "step/wrapped_call.hpp"

#include <cstdint>
#include <functional>

namespace infinitybatch {

class Executor;

/// The user's part of a wrapped model's step has none that a rehearsal could compute.
const CoupledLoss& no_loss();

/// Measures what the planner still wants to know of a wrapped model's call, and undoes it. Nothing
/// of the caller's loss is known: gradients of the outputs are stood in for.
struct WrapRehearsal {
  Wrapped& wrapped;
  const Setup& call;  ///< with its findings, which are kept
  const Batch& inputs;
  const BatchSource& rows;  ///< of these, detached
  const BatchKind& kind;
  Planner& planner;
  GraphChoices& choices;
  bool with_gradients;
  std::function<Request()> request = {};    ///< for what is live now
  std::function<void()> check_inputs = {};  ///< \throws Unsupported where forward has changed them
  /// What each piece has told.
  std::function<void(const Executor&, Rows, const Measurement&)> learn = {};
  bool began = false;       ///< the planner knows of it
  int64_t failed_rows = 0;  ///< where `run` throws: see `FewestRows`

  void run();

 private:
  Batch wanting(int64_t begin, int64_t end) const;
  StaticTapes static_tapes(const Problem& problem) const;
};

}  // namespace infinitybatch
