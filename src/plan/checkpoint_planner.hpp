#pragma once

#include "execute/checkpoints.hpp"

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <vector>

namespace infinitybatch {

namespace plan {
class CutSearch;
class NarrowPlaces;
}  // namespace plan

/// Chooses where the tape of a micro-batch whose graph does not fit is cut.
///
/// A light recording tells what each op keeps. Cuts are looked for where little waits
/// (`plan::NarrowPlaces`, `plan::CutSearch`): of each stretch of equal bytes the narrowest place;
/// of a tape of more ops than places, where these are too far apart for the budget, any op.
/// Segments are not of equal size: backward begins with few sums, and ends with little that waits.
/// What the estimate cannot know (workspace) is learned: a measured peak, or running out of memory,
/// corrects it. The problem is that of Feng and Huang, "Optimal Gradient Checkpoint Search for
/// Arbitrary Computation Graphs" (2018), on a line of ops. Where ops see the whole batch each
/// stretch between two of them is such a line by itself, beside what all micro-batches leave in
/// front of these ops.
class CheckpointPlanner : public Checkpoints {
 public:
  /// What it chooses for.
  struct Situation {
    int64_t available = 0;         ///< bytes for everything but what is live before the step
    bool offloaded = false;        ///< what waits leaves the device
    int64_t micro_batches = 1;     ///< in the step
    bool coupled = false;          ///< the loss is computed on the outputs of all
    bool together = false;         ///< they go from op to op of the whole batch together
    std::optional<int64_t> fixed;  ///< segments wished for, of each stretch; nothing: as they fit
    bool operator==(const Situation&) const = default;
  };
  /// Of an attempt. What was chosen and learned stays while it fits: what is live before a step
  /// (a list of losses) differs by some bytes from step to step.
  void begin(const Situation& situation);

  std::vector<uint32_t> choose(const tape::Tape& tape,
                               const std::vector<uint32_t>& ops = {}) override;

  /// From now on nothing waits for a coupled loss; see `Checkpoints::again`.
  void begin_again();
  /// From now on nothing waits at the cuts; see `Checkpoints::forget`.
  void begin_forgetting();
  /// Plans smaller. False where the smallest segments have been tried.
  bool ran_out_of_memory();
  /// What micro-batches took above what was live before the step.
  void measured(int64_t bytes);

  /// The most of the attempt's choices, above what is live before the step: what the last attempt
  /// took that did the same, or else what they are taken to need.
  int64_t estimate() const;
  int64_t segments() const noexcept { return segments_; }
  /// Whether there is room for a frontier that comes back while the segment behind it is at work.
  bool overlaps() const noexcept { return overlaps_; }

 private:
  /// What was chosen for a program: it stays, so that frontiers can be kept where they were.
  struct Known {
    std::vector<const tape::OpFacts*> ops;
    std::vector<uint32_t> slots;
    std::vector<tape::ValueId> elements;
    std::vector<tape::ValueId> outputs;
    /// Of its first recording: later ones keep graphs, and cost something else.
    tape::Costs costs;
    bool guessed = false;  // what its last ops save
    bool stale = false;    // to be chosen anew
    std::vector<uint32_t> cuts;
    int64_t estimate = 0;
    int64_t overlapped = 0;  ///< with a frontier on its way
    int64_t sums = 0;
    bool smallest = false;
    /// Of one program; the rest is left empty.
    static Known of(const tape::Tape& tape);
    bool is_program_of(const Known& other) const;
  };
  /// \param ops that see the whole batch
  void search(const tape::Tape& tape, const std::vector<uint32_t>& ops, Known& known) const;
  void search(const tape::Tape& tape, const std::vector<uint32_t>& ops,
              const plan::NarrowPlaces& places, Known& known) const;
  void add_cuts(const plan::CutSearch& search, Known& known) const;
  /// Whether what waits is away, or was never there.
  bool offloaded() const noexcept { return situation_.offloaded || forget; }
  /// Whether frontiers may come back while others are at work.
  bool may_overlap() const noexcept {
    return offloaded() && !situation_.coupled && !situation_.together && !forget && !in_turn_;
  }
  void start_over();
  void start_afresh();

  using Guides = std::map<int64_t, tape::FrontierGuide>;
  /// An attempt that went by cuts that stood before.
  struct Went {
    Guides guides;  ///< when it began
    int64_t bytes = 0;
  };

  std::deque<Known> known_;
  Situation situation_;
  int64_t room_ = 0;       // available, when the choices were made
  Guides guides_;          // when the attempt began
  bool searched_ = false;  // in the attempt at work
  std::optional<Went> went_;
  double correction_ = 1.0;  // needed ÷ estimated, beside the sums of gradients
  bool overlaps_ = false;
  bool in_turn_ = false;   // overlapping has run out of memory
  bool smallest_ = false;  // so were all choices of the last attempt that made any
  bool chosen_ = false;    // in the attempt at work
  int64_t estimate_ = 0;
  int64_t sums_ = 0;  // of gradients, in the estimate
  int64_t segments_ = 1;
};

}  // namespace infinitybatch
