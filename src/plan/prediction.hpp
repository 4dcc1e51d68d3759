#pragma once

#include "plan/learned.hpp"
#include "plan/request.hpp"

#include <cstdint>
#include <optional>

namespace infinitybatch::plan {

/// Added to the largest measured peak per sample where memory depends on the data's values.
inline constexpr double kIrregularMargin = 0.25;

/// What a step in micro-batches of a size is predicted to take, by what was learned. Peaks are
/// bytes that are live on the device, what is so before the step included.
class Prediction {
 public:
  using Effect = MicroBatchProfile::Effect;

  Prediction(const Request& request, const Learned& learned)
      : request_(request), learned_(learned) {}

  /// Of a step that keeps no graph.
  int64_t peak(int64_t size) const;
  bool fits(int64_t size) const {
    return learned_.shortages.allows(size) && !was_refused(size) &&
           peak(size) <= request_.budget_bytes;
  }
  /// The same of a probe before there is a profile: of a piece of cut tapes, beside which nothing
  /// of the others waits.
  bool fits_alone(int64_t size) const;
  /// Whether one micro-batch fits in the middle of a step, from `row` on. In a whole step the
  /// first, the largest of all, still finds no gradient buffers; here every one does.
  bool fits_later(int64_t size, int64_t row) const;
  /// What a whole step of this split has taken, on top of what is live now.
  std::optional<int64_t> measured_step(int64_t size) const;

  /// Of the micro-batch of a plan with lengths that takes the most by itself.
  int64_t length_of_peak(const Plan& plan) const;

  // With `Request::two_pass`:

  /// The whole step that keeps the graphs of so many samples, and with copies beside compute if
  /// these fit.
  Plan plan(int64_t size, int64_t kept) const;
  /// The samples whose graphs fit beside everything else: the last ones. None before the loss has
  /// been measured: it comes while all graphs are held.
  int64_t kept_samples(int64_t size) const;
  /// The part of the work that this is.
  double kept_share(int64_t size) const;
  double kept_share(int64_t size, int64_t kept) const;
  /// Of a whole plan, as the simulator tells it; and by what was measured above that.
  int64_t simulated(const Plan& plan) const;
  int64_t corrected(const Plan& plan) const;
  /// Of a plan with so many micro-batches that keeps no graph.
  std::optional<Effect> whole_loss(size_t micro_batches) const;
  bool knows_whole_loss(size_t micro_batches) const;
  /// Bytes of outputs that graphs which are kept go on holding once all have been joined.
  int64_t held_beside_joined(const Plan& plan) const;

 private:
  /// See `Learned::refused`; with clearly more room than then it may be tried.
  bool was_refused(int64_t size) const;
  /// Measured peak ÷ predicted peak, of this size or the next smaller one that was measured.
  double correction(int64_t size) const;
  /// Of a micro-batch of so many samples in front of all that are kept whole, how many are kept:
  /// none unless that saves more than one more micro-batch takes.
  int64_t kept_part(int64_t size, int64_t whole, int64_t next) const;
  bool fits_keeping(int64_t size, int64_t kept) const;
  /// Above what is live before the step:
  double simulated_above(int64_t size) const;
  double streamed_above(int64_t size) const;
  int64_t two_pass_above(int64_t size, int64_t kept, bool overlap) const;
  int64_t corrected_above(int64_t above) const;
  double bound_above(int64_t size) const;
  double bound_alone(int64_t size) const;
  Effect whole_loss_of(const Plan& plan) const;
  bool copies_outputs(const Plan& plan) const;
  /// What joining the outputs of all does: part of what the loss on them is measured to take.
  Effect join_of(const Plan& plan) const;

  const Request& request_;
  const Learned& learned_;
};

}  // namespace infinitybatch::plan
