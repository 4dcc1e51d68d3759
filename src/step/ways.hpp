#pragma once

#include "execute/executor.hpp"
#include "step/step_facts.hpp"

#include <infinitybatch/step/virtual_batch.hpp>

#include <cstdint>
#include <optional>
#include <vector>

namespace infinitybatch {

/// The ways that an attempt can go, one function each. All follow `facts.plan`, which they make,
/// and fill in what the report says of it. Without `hand_out` they stop before it.
class Ways {
 public:
  explicit Ways(StepFacts& facts) : facts_(facts) {}

  /// A fixed size, from cut to cut where the strategy says so.
  void follow_fixed_size(Executor& executor, const Setup& setup, bool hand_out, StepReport& report);
  /// What the planner says.
  void follow_planner(Executor& executor, const Setup& setup, int64_t budget, bool hand_out,
                      StepReport& report);
  /// Micro-batch by micro-batch, each of them segment by segment; or, where ops see the whole
  /// batch, so from one of them to the next.
  void follow_checkpoints(Executor& executor, const Setup& setup,
                          const std::optional<int64_t>& budget, bool hand_out, StepReport& report);

  /// Measures what the planner still wants to know of a coupled loss's micro-batches, and undoes
  /// it.
  void rehearse(const Setup& setup, int64_t budget);
  /// What the planner is asked for.
  Request request(const Setup& setup, int64_t budget) const;
  /// Graphs or boundaries, where the strategy offloads: by what was chosen.
  void choose_offload(Strategy& strategy) const;
  /// Of a coupled loss that offloads, once it is rehearsed: finds out whether offloading all graphs
  /// takes less time than second forwards.
  void choose_graphs(const Setup& setup, int64_t budget);
  /// See `BoundaryChoice::choose`.
  bool choose_boundaries(Setup& setup, int64_t budget);

 private:
  /// Sizes of micro-batches of a fixed size.
  std::vector<int64_t> fixed_sizes(const Setup& setup, int64_t rows, bool for_cuts) const;
  /// Records, and then follows the plan that the recordings ask for.
  void follow_cuts(Executor& executor, const Setup& setup, std::vector<int64_t> sizes,
                   bool hand_out);
  /// Whether graphs are offloaded by choice.
  bool offloads_graphs() const;
  /// \param rows of the micro-batch that an executor has recorded
  void learn_boundaries(const Executor& executor, const Setup& setup, Rows rows);
  /// With a fixed size: whether offloaded values may be copied while other micro-batches compute.
  bool may_overlap(const Setup& setup) const;

  StepFacts& facts_;
};

}  // namespace infinitybatch
