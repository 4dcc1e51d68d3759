#pragma once

#include "execute/findings.hpp"
#include "execute/static_tapes.hpp"
#include "plan/boundaries.hpp"
#include "plan/checkpoint_planner.hpp"
#include "plan/request.hpp"
#include "step/batch_kind.hpp"
#include "step/few_rows.hpp"

#include <exception>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>

namespace infinitybatch {

/// What is known of a program on one kind of batch, whatever the lengths of its samples.
struct Knowledge {
  Findings findings;  ///< what checks have told

  // What failures have taught, of steps that failed too:
  bool uncut = false;              ///< its tapes cannot be cut, or need not be
  bool whole = false;              ///< its samples are coupled beyond cuts: it is one micro-batch
  std::exception_ptr why_coupled;  ///< then, or where it is uncut
  FewRows few_rows;                ///< whether forward fails on a few samples

  std::map<std::string, StaticTapes> static_tapes;  ///< by the lengths of samples

  /// Leaves out what failures have ruled out.
  /// \throws CouplingError  where only one micro-batch is exact, and its rows are sorted
  void limit(Request& request) const {
    request.whole_batch_only = whole;
    if (whole && request.reordered) std::rethrow_exception(why_coupled);
    request.fails_on = few_rows.failing();
  }
};

/// Which ways have turned out to need more memory than there is, for batches with these lengths,
/// whatever the program.
struct KnownMemory {
  std::optional<CheckpointPlanner> checkpoints;  ///< one sample does not fit as a whole
  std::optional<plan::Boundaries> boundaries;    ///< in front of ops of the whole batch, once seen
  KeptBoundaries kept;                           ///< of these, where not all fit
  /// Of what was rehearsed beside fewer: whether offloaded, how many samples in how large
  /// micro-batches, both to a power of two.
  using Compared = std::tuple<bool, int, int>;
  std::set<Compared> compared;
  std::string what_compared;  ///< what the last of these has told
  bool offloads = false;      ///< what waits does not fit
  bool in_turn = false;       ///< nor what is copied beside other micro-batches' work

  /// What waits leaves the device from now on; false where it does already.
  bool begin_offload() {
    what_compared.clear();
    return !std::exchange(offloads, true);
  }
};

/// Everything that one object knows of batches.
class KnowledgeBase {
 public:
  Knowledge& of(const BatchKind& kind) { return programs_[kind.program]; }
  KnownMemory& memory_of(const BatchKind& kind) { return memory_[kind.shapes()]; }
  /// Where ever new programs run.
  void forget_programs() { programs_.clear(); }

 private:
  std::map<std::string, Knowledge> programs_;
  std::map<std::string, KnownMemory> memory_;
};

}  // namespace infinitybatch
