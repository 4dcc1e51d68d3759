#pragma once

#include "execute/recorded.hpp"

#include <infinitybatch/execute/plan.hpp>

#include <cstdint>
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

  struct Choice {
    KeptBoundaries kept;
    int64_t bytes = 0;  ///< the most of what waits, its gradients included
    double again = 0;   ///< computed once more, as a share of a forward
  };
  /// All are kept.
  Choice all(int64_t samples) const;
  /// What takes the least time with at most so many bytes; nothing where nothing does.
  /// \param samples of the logical batch
  std::optional<Choice> within(int64_t bytes, int64_t samples) const;
  /// What takes the fewest bytes, to about one in a thousand.
  Choice least(int64_t samples) const;

 private:
  /// What one segment gives, in one memory.
  struct Given {
    int64_t giver = 0;
    int64_t first = 0;  // segment to need it
    int64_t last = 0;
    double bytes = 0;  // of one sample
  };
  /// From an op whose boundary is kept, or the inputs, to the next.
  struct Block {
    double beside = 0;  // bytes of one sample, beside what is kept in front of it
    double kept = 0;    // bytes that the next one adds to what is kept
    double again = 0;   // share of a forward
  };
  /// Where every second forward ends: in front of the op at which all arrive at once, or behind the
  /// last.
  int64_t end() const noexcept { return coupled_ ? ops_ + 1 : ops_; }
  /// In front of op `at`, and not in front of op `beside`.
  double added(int64_t beside, int64_t at) const;
  Block block(int64_t begin, int64_t end) const;

  int64_t ops_;
  bool coupled_;
  std::vector<Given> given_;
  std::vector<double> work_;                // of each segment, as a share of all
  std::vector<std::vector<Block>> blocks_;  // from each op, 0 for the inputs, to those behind it
};

}  // namespace infinitybatch::plan
