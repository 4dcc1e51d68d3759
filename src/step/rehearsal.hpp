#pragma once

#include "execute/setup.hpp"
#include "plan/planner.hpp"
#include "step/graph_choice.hpp"

#include <cstdint>
#include <exception>
#include <functional>

namespace infinitybatch {

class Executor;

/// Measures what the planner still wants to know of a batch's micro-batches, on its own rows, and
/// undoes it.
struct Rehearsal {
  Planner& planner;
  GraphChoices& choices;
  Setup setup;
  std::function<Request()> request;  ///< for what is live now
  /// Is told the first micro-batch, too, and what was measured; may throw.
  std::function<void(const Executor&, Rows, const Measurement&)> after_piece;
  std::function<void(Setup&)> in_front = {};  ///< of each executor

  // What `run` tells:
  bool began = false;                ///< the planner knows of it
  int64_t failed_rows = 0;           ///< where it fails: see `FewestRows`
  bool coupled_beyond_cuts = false;  ///< the same: see `Executor::coupled_beyond_cuts`

  /// \throws what a piece does
  void run();
};

}  // namespace infinitybatch
