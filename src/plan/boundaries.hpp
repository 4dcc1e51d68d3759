#pragma once

#include "execute/recorded.hpp"

#include <infinitybatch/execute/plan.hpp>

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

namespace infinitybatch::plan {

/// The boundary activations of a whole batch in front of the ops that see it, and which of them to
/// keep: those of the others are computed again, block by block, from one that is kept to the next.
///
/// A block needs on its way back what lies in front of the ops in it, once for the whole batch,
/// beside all that is kept below it and the gradients at one op. So bytes are a maximum over blocks
/// of sums over the blocks below, and time is a sum over blocks: dynamic programming from the first
/// op on, over those pairs of bytes kept and time so far of which none is better in both. The
/// problem is that of Chen, Xu, Zhang and Guestrin, "Training Deep Nets with Sublinear Memory Cost"
/// (2016), for a chain whose parts differ.
class Boundaries {
 public:
  /// \param recorded of so many samples, cut in front of ops of the whole batch alone
  /// \param coupled  the loss is computed on the outputs of all
  Boundaries(const Recorded& recorded, int64_t samples, bool coupled);

  /// Ops that see the whole batch.
  int64_t ops() const noexcept { return ops_; }

  /// Seconds of a sample's way forward through segments, of which the least that were seen count.
  /// Until those of all have been, a segment's work is taken to be the bytes that its ops make.
  void learn(const std::map<int64_t, double>& seconds);
  /// Whether that of any has been seen: not where the plan is that of other lengths.
  bool timed() const noexcept { return !seconds_.empty(); }

  struct Choice {
    KeptBoundaries kept;
    int64_t bytes = 0;  ///< the most of what waits, its gradients included
    double again = 0;   ///< computed once more, as a share of a forward
  };
  /// What a choice takes.
  Choice with(const KeptBoundaries& kept, int64_t samples) const;
  /// What takes the least time with at most so many bytes; nothing where nothing does.
  /// \param samples of the logical batch
  std::optional<Choice> within(int64_t bytes, int64_t samples) const;
  /// What takes the fewest bytes, to the last: nothing is left where it does not fit. Whatever
  /// times were seen it is the same one, so that a budget that is said to be enough for it is.
  Choice least(int64_t samples) const;

 private:
  /// What one segment gives, in one memory.
  struct Given {
    int64_t giver = 0;
    int64_t first = 0;  // segment to need it
    int64_t last = 0;
    double bytes = 0;  // of one sample
  };
  /// From an op whose boundary is kept, or the inputs, to the next. Bytes of one sample.
  struct Block {
    double beside = 0;  // the most that is there beside what is kept up to its beginning
    double kept = 0;    // what the next one adds to that
  };
  void note_given(const Recorded& recorded, int64_t segment, int64_t samples);
  /// In front of this op all micro-batches arrive at once and go back, or it is behind the last.
  int64_t end() const noexcept { return coupled_ ? ops_ + 1 : ops_; }
  Block block(int64_t begin, int64_t end) const;
  /// What a block computes once more, as a share of a forward.
  static double again(const std::vector<double>& work, int64_t begin, int64_t end);
  /// See the other one.
  /// \param work of each segment
  std::optional<Choice> within(int64_t bytes, int64_t samples,
                               const std::vector<double>& work) const;

  int64_t ops_;
  bool coupled_;
  std::vector<Given> given_;
  std::vector<double> made_;           // bytes by each segment's ops, as a share of all
  std::vector<double> work_;           // of each segment, as a share of all
  std::map<int64_t, double> seconds_;  // of segments
  /// Bytes in front of an op, the second index, that are not there in front of the first; of 0 all.
  std::vector<std::vector<double>> added_;
  std::vector<std::vector<Block>> blocks_;  // from each op, 0 for the inputs, to those behind it
};

}  // namespace infinitybatch::plan
