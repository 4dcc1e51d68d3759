#pragma once

#include "execute/profile.hpp"

#include <infinitybatch/core/batch_source.hpp>
#include <infinitybatch/execute/plan.hpp>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace infinitybatch {
namespace plan {
class Packing;
}

/// What is asked of the planner for one step.
struct Request {
  std::string signature;  ///< types and ranks of a sample's leaves, train or eval, autocast
  /// How long samples are: what is alike but for these shares plans. Of one signature always as
  /// many leaves of the same ranks.
  Dims dims;
  /// How long each row is, the longest first, where a micro-batch is computed at the length of its
  /// longest. Empty where all are as long as `dims` says.
  std::vector<int64_t> lengths;
  int64_t length = 0;  ///< of all rows, and so of their outputs; 0: see `dims`
  /// Rows are not as the caller gave them. A forward that combines samples, or leaves something for
  /// each, would meet another order in one micro-batch of all: there are two, where they are seen.
  bool reordered = false;
  int64_t batch_size = 0;
  int64_t baseline_bytes = 0;  ///< live on the device when the first instruction starts
  int64_t budget_bytes = 0;
  int64_t reserved_bytes = 0;  ///< of the user's budget, for a loss nobody has seen; not in these
  int64_t gradient_bytes = 0;  ///< of all parameters; for messages
  bool penalty = false;
  bool two_pass = false;         ///< measured in a rehearsal: a coupled loss, or tapes that are cut
  int64_t segments = 0;          ///< where above 0: of cut tapes
  KeptBoundaries kept;           ///< of these, with `segments` and nothing offloaded
  int64_t waiting_bytes = 0;     ///< with them, the most that waits of the whole batch, if known
  bool goes_back = true;         ///< with `segments`: up to the inputs, not to the loss alone
  bool offloaded = false;        ///< what waits leaves the device, so no graph is kept there
  bool outputs_offload = false;  ///< outputs of a coupled loss and their gradients among it
  bool outputs_elsewhere = false;  ///< a coupled loss computes on another device
  bool keeps_graphs = true;        ///< with `two_pass`: as many as fit
  bool offloads_graphs = false;    ///< with `offloaded`: all are kept, away from the device
  bool whole_loss = true;          ///< with `two_pass`: the loss is computed on the outputs of all
  bool joins_streamed = false;     ///< without `two_pass`: outputs are kept, and joined in the end
  /// Nothing refuses what passes the budget (accelerators): only sizes that fit by all that is
  /// known are tried, from two samples on, and blocks are rounded.
  bool measured = false;
  bool whole_batch_only = false;  ///< samples are coupled: one micro-batch of all is exact
  /// Forward fails on so many samples, and on fewer: sizes are tried from the whole batch down.
  int64_t fails_on = 0;
  bool copies_one = false;  ///< outputs of a single micro-batch are copied where others are joined

  /// How rows of other lengths are packed, once it is known what these take; then sizes are in its
  /// unit. Null: they are samples, and micro-batches as equal as can be.
  std::shared_ptr<const plan::Packing> packing;

  /// But for what is live when the step starts.
  bool is_alike(const Request& other) const;
  /// In which boundary activations are kept, and in nothing else that tells of a loss; see
  /// `plan_with`.
  bool differs_in_kept_alone(const Request& other) const;
  /// The rows from `row` on in micro-batches of at most this size.
  std::vector<int64_t> split(int64_t size, int64_t row = 0) const;
  /// As few of them as possible: their number, and the least size that makes no more.
  int64_t count_under(int64_t cap) const;
  int64_t size_under(int64_t cap) const;
  /// The size of one micro-batch of all rows.
  int64_t whole() const;
  /// The largest that may be planned.
  int64_t most() const { return reordered ? whole() - 1 : whole(); }
  /// Sizes of a sample as long as those that were traced.
  int64_t unit() const;
  /// Whether each size is timed in pieces of one micro-batch that a step does not need.
  bool rehearses_sizes() const noexcept { return segments > 0 && !packing; }
  /// Of these micro-batches, the first of which begins at `row`, what their longest rows have.
  std::vector<int64_t> lengths_of(const std::vector<int64_t>& sizes, int64_t row = 0) const;
};

/// A stretch of a step: consecutive micro-batches, and what to measure while they run.
struct Piece {
  Plan plan;
  int64_t size = 0;          ///< by which it was split, as the planner counts
  int64_t first_row = 0;     ///< a rehearsal may pass over some
  int64_t least_length = 0;  ///< that its micro-batches are computed at, whatever their rows have
  bool trace = false;        ///< record allocations (a single micro-batch)
  bool ahead = false;        ///< a rehearsal's first, in front of one whose length is learned
  /// Where above 0: micro-batches of one size, each of which is timed; on accelerators this waits
  /// for the device.
  int64_t timed_cap = 0;
  bool settled = false;  ///< a whole step of a plan that is settled
};

/// What was measured while a piece ran.
struct Measurement {
  std::optional<MicroBatchTrace> trace;
  std::optional<MicroBatchProfile::Effect> whole_loss;
  std::vector<double> seconds;  ///< of each micro-batch of a timed piece
  std::vector<double> again;    ///< of these: forward once more, which a kept graph saves
  /// Of a piece that is timed or traced: seconds of a sample on its way forward, by segment; the
  /// least of its micro-batches.
  std::map<int64_t, double> advances;
  int64_t peak_bytes = 0;
  int64_t lasting_bytes = 0;  ///< live more than before, beside sums of gradients
  /// Of every micro-batch, where they need not be alike: how long its samples are. Else empty.
  std::vector<Dims> dims;
};

}  // namespace infinitybatch
