#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace infinitybatch {

/// How long micro-batches of each size took, and which sizes are worth another look. Other work on
/// the machine makes a micro-batch slower, never faster: the best of several counts.
class Timings {
 public:
  struct Timing {
    std::vector<double> seconds_per_sample;  ///< of each micro-batch
    /// Of these, those behind the first of a step: it writes sums of gradients that they read, too.
    std::vector<double> later_per_sample;
    std::vector<double> again_per_sample;  ///< of these: forward once more
    double size = 0;                       ///< samples of the largest
    double seconds = 0;                    ///< of all of them
    int pieces = 0;
    /// Where samples are of unequal length the best is that of the shortest: the mean counts.
    bool average = false;
    int cold = 0;  ///< single micro-batches that were not counted, being the first of their size
    /// Per sample. \param kept of the samples, those whose graph is kept
    double estimate(double kept = 0) const;
  };
  /// A piece of micro-batches of one size.
  struct Piece {
    int64_t size = 0;
    const std::vector<double>& seconds;
    const std::vector<double>& again;
    bool first = false;   ///< a piece of another size came before
    bool begins = false;  ///< a step whose gradients are summed
    bool average = false;
    double scale = 1;
    const std::vector<double>* work = nullptr;  ///< of each, in samples, in place of `size`
    bool rehearsed = false;                     ///< see `wants`
  };

  /// Null where no micro-batch of it counts yet.
  const Timing* of(int64_t cap) const;
  int pieces(int64_t cap) const;
  /// The part of a micro-batch of this size whose second forward takes as long as one more
  /// micro-batch; infinite where nobody knows, as none of two thirds of the size or less was timed.
  double part_that_pays(int64_t size) const;
  /// \param rehearsed each piece is one micro-batch that a step does not need: few of each size,
  ///                  and none of sizes below two that are slower than the fastest, or one that
  ///                  is far slower
  bool wants(int64_t cap, bool rehearsed) const;
  /// How many micro-batches of `size` samples a piece runs, with the one that is not counted.
  int64_t count(int64_t cap, int64_t size, bool first) const;
  void learn(int64_t cap, const Piece& piece);
  /// Sizes are told in parts of what they were told in until now.
  void tell_in_parts(int64_t parts);

 private:
  std::map<int64_t, Timing> by_cap_;
};

}  // namespace infinitybatch
