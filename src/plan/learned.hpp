#pragma once

#include "execute/profile.hpp"
#include "plan/request.hpp"
#include "plan/shortages.hpp"
#include "plan/timings.hpp"

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace infinitybatch::plan {

/// What the loss on the outputs of all was measured to do to live memory, beside what kept graphs
/// hold of these outputs: by batch size, whether there was one micro-batch, and the length of all
/// samples where that is told.
class WholeLoss {
 public:
  using Effect = MicroBatchProfile::Effect;
  struct Of {
    int64_t batch_size = 0;
    bool one = false;
    int64_t length = 0;
    auto operator<=>(const Of&) const = default;
  };

  /// Whether what it takes was measured, or that of longer samples, which take no less.
  bool knows(const Of& of) const;
  /// Measured with one or several micro-batches, or the other of these; else what longer samples
  /// took, or as much more than shorter ones as the square of the length.
  std::optional<Effect> of(const Of& of) const;
  void put(const Of& of, Effect effect) { known_[of] = effect; }
  bool empty() const noexcept { return known_.empty(); }
  /// The most of what was ever seen counts. Returns how much more that is than before: 0, or
  /// nothing where it was not known.
  std::optional<int64_t> raise(const Of& of, Effect effect);
  /// Of all that was measured until now, which had none.
  void tell_length(int64_t length);

 private:
  std::map<Of, Effect> known_;
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
  std::optional<MicroBatchTrace> first;  ///< of a step, where these are of rows behind it
  std::optional<MicroBatchProfile> profile;
  bool irregular = false;  ///< traces of different sizes tell different stories
  bool ragged = false;     ///< samples of one logical batch are of unequal length
  Lengths lengths;
  /// With `Request::lengths`: four rows that are longer have run out of memory, and two that are as
  /// long as this.
  int64_t reference_limit = INT64_MAX;
  int64_t too_long = INT64_MAX;
  int other_stories = 0;      ///< traces of other lengths that the profile could not take
  int64_t wanted_length = 0;  ///< near which a step took another peak than predicted
  int refits = 0;             ///< how often one did
  double roughness = 1.0;     ///< what a trace showed ÷ what was predicted, where that was less
  std::map<int64_t, int64_t> peaks;  ///< measured, above the baseline, by size
  /// Of whole steps, the last, above the baseline, by batch size and size. What has fit is not
  /// refused by a prediction, which takes memory to grow with the size.
  std::map<std::pair<int64_t, int64_t>, int64_t> steps;
  /// Above the baseline, when the second pass began, the most: what outputs and the loss on them
  /// hold meanwhile, where no profile tells.
  int64_t held = 0;
  /// Sizes of which a second pass has run out of memory, where nobody can begin it again, each with
  /// the most room that it had.
  std::map<int64_t, int64_t> refused;
  double correction = 1.0;           ///< measured peak ÷ predicted peak, where that was more
  int raises = 0;                    ///< how often it was raised because memory ran out
  std::map<int64_t, double> ratios;  ///< the same with `Request::measured`: the last, by size
  WholeLoss whole_loss;
  Timings timings;
  Shortages shortages;

  /// What was learned of samples of one length is from now on what others are planned with, too.
  void tell_length(int64_t length);
  /// Takes a trace of one or two micro-batches, as `request` measures them.
  void learn(MicroBatchTrace trace, const Request& request);
};

}  // namespace infinitybatch::plan
