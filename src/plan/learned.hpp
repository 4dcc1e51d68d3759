#pragma once

#include "execute/profile.hpp"
#include "plan/request.hpp"
#include "plan/shortages.hpp"
#include "plan/timings.hpp"

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace infinitybatch::plan {

/// What the loss on the outputs of all was measured to do to live memory, beside what kept graphs
/// hold of these outputs: by batch size, and whether there was one micro-batch.
class WholeLoss {
 public:
  using Effect = MicroBatchProfile::Effect;

  bool knows(int64_t batch_size, bool one) const { return known_.contains({batch_size, one}); }
  /// Measured with one or several micro-batches, or the other of these.
  std::optional<Effect> of(int64_t batch_size, bool one) const;
  void put(int64_t batch_size, bool one, Effect effect) { known_[{batch_size, one}] = effect; }
  /// The most of what was ever seen counts. Returns whether that is more than before.
  bool raise(int64_t batch_size, bool one, Effect effect);

 private:
  std::map<std::pair<int64_t, bool>, Effect> known_;
};

/// How long samples are, where that differs within a logical batch.
struct Lengths {
  std::optional<Dims> first;        ///< of the first micro-batch that was seen
  double longest = 0;               ///< elements of a sample, the most that was seen
  std::map<int64_t, double> works;  ///< by size: the most elements of a sample in it
};

/// What steps have told of one kind of sample.
struct Learned {
  std::vector<MicroBatchTrace> traces;
  std::optional<MicroBatchProfile> profile;
  bool irregular = false;  ///< traces of different sizes tell different stories
  bool ragged = false;     ///< samples of one logical batch are of unequal length
  Lengths lengths;
  std::map<int64_t, int64_t> peaks;  ///< measured, above the baseline, by size
  /// Of whole steps, the last, above the baseline, by batch size and size. What has fit is not
  /// refused by a prediction, which takes memory to grow with the size.
  std::map<std::pair<int64_t, int64_t>, int64_t> steps;
  double correction = 1.0;           ///< measured peak ÷ predicted peak, where that was more
  std::map<int64_t, double> ratios;  ///< the same with `Request::measured`: the last, by size
  WholeLoss whole_loss;
  Timings timings;
  Shortages shortages;

  /// Takes a trace of one or two micro-batches, as `request` measures them.
  void learn(MicroBatchTrace trace, const Request& request);
};

}  // namespace infinitybatch::plan
