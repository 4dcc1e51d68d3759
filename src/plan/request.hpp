#pragma once

#include "execute/profile.hpp"

#include <infinitybatch/core/batch_source.hpp>
#include <infinitybatch/execute/plan.hpp>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace infinitybatch {

/// What is asked of the planner for one step.
struct Request {
  std::string signature;  ///< types and ranks of a sample's leaves, train or eval, autocast
  /// How long samples are: what is alike but for these shares plans. Of one signature always as
  /// many leaves of the same ranks.
  Dims dims;
  int64_t batch_size = 0;
  int64_t baseline_bytes = 0;  ///< live on the device when the first instruction starts
  int64_t budget_bytes = 0;
  bool penalty = false;
  bool two_pass = false;         ///< measured in a rehearsal: a coupled loss, or tapes that are cut
  int64_t segments = 0;          ///< where above 0: of cut tapes
  KeptBoundaries kept;           ///< of these, with `segments` and nothing offloaded
  bool offloaded = false;        ///< what waits leaves the device, so no graph is kept there
  bool outputs_offload = false;  ///< outputs of a coupled loss and their gradients among it
  bool keeps_graphs = true;      ///< with `two_pass`: as many as fit
  bool offloads_graphs = false;  ///< with `offloaded`: all are kept, away from the device
  bool whole_loss = true;        ///< with `two_pass`: the loss is computed on the outputs of all
  /// Nothing refuses what passes the budget (accelerators): only sizes that fit by all that is
  /// known are tried, from two samples on, and blocks are rounded.
  bool measured = false;
  bool whole_batch_only = false;  ///< samples are coupled: one micro-batch of all is exact
  /// Forward fails on so many samples, and on fewer: sizes are tried from the whole batch down.
  int64_t fails_on = 0;
  bool copies_one = false;  ///< outputs of a single micro-batch are copied where others are joined

  /// As few micro-batches of at most `cap` samples as possible: their number, and the size of the
  /// largest where they are as equal as can be.
  int64_t count_under(int64_t cap) const { return (batch_size + cap - 1) / cap; }
  int64_t size_under(int64_t cap) const {
    const int64_t count = count_under(cap);
    return (batch_size + count - 1) / count;
  }
};

/// A stretch of a step: consecutive micro-batches, and what to measure while they run.
struct Piece {
  Plan plan;
  bool trace = false;  ///< record allocations (a single micro-batch)
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
