#pragma once

#include <infinitybatch/execute/plan.hpp>

#include <cstdint>
#include <vector>

// Strategies as plans: each of these functions is a shape of the one schedule.
namespace infinitybatch {

/// Sizes of micro-batches of `size` samples; the last one is smaller where `size` does not divide.
std::vector<int64_t> split_by(int64_t batch_size, int64_t size);

/// As few micro-batches of at most `size` samples as possible, all equal to within one sample.
std::vector<int64_t> split_evenly(int64_t batch_size, int64_t size);

/// `split_by`, or evenly where that leaves a single sample over, which layers that see the whole
/// batch may refuse.
std::vector<int64_t> split_for_cuts(int64_t batch_size, int64_t size);

/// The streaming strategy: micro-batch after micro-batch, forward to backward, then one hand-out.
Plan stream_plan(std::vector<int64_t> micro_batch_sizes, bool penalty);

/// The two passes of a coupled loss. The last `retained` micro-batches keep their graphs, which are
/// consumed first, last to first, so that memory falls as backward goes. With `offloads_graphs`,
/// and `with_offload`, each of them leaves the device after its forward, and comes back for its
/// backward.
Plan two_pass_plan(std::vector<int64_t> micro_batch_sizes, int64_t retained,
                   bool offloads_graphs = false);

/// A micro-batch's tape between ops that see the whole batch: for each such stretch the number of
/// the segment behind its last one. Without cuts for memory that is 1, 2, …
using Stretches = std::vector<int64_t>;

/// A model with ops that see the whole batch: all micro-batches are recorded, then go together from
/// op to op, and back. The first instructions, one `record` each, are the same for any number of
/// segments. With cuts for memory a stretch is played segment by segment: forward, and, for each
/// micro-batch, last first on the way back.
/// \param stretches of each micro-batch's tape; of all as many
/// \param coupled whether the loss is computed on the outputs of all
Plan cut_plan(std::vector<int64_t> micro_batch_sizes, const std::vector<Stretches>& stretches,
              int64_t retained, bool coupled, bool penalty);
/// The same without cuts for memory.
/// \param kept from one of these boundaries to the next, or to the end, each micro-batch goes once
///             more, up to the last cut, when its way back arrives there; then no graph is kept
Plan cut_plan(std::vector<int64_t> micro_batch_sizes, int64_t segments, int64_t retained,
              bool coupled, bool penalty, const KeptBoundaries& kept = {});

/// `plan`, of tapes that are cut, with what waits away from the device while its micro-batch is not
/// at work. With `overlap` a micro-batch's values come back while the one before it computes, and
/// leave while the one after it does: two frontiers more are on the device at a time. What each
/// instruction does to memory is the same, in another order; so one rehearsal tells both stories.
Plan with_offload(Plan plan, bool overlap);

/// One micro-batch that goes through its cut tape alone: a rehearsal, as `rehearsal_plan`.
Plan cut_rehearsal_plan(std::vector<int64_t> micro_batch_sizes, int64_t segments, bool coupled,
                        const KeptBoundaries& kept = {});

/// Micro-batches whose graph does not fit: each is recorded, and then played again segment by
/// segment, last first. How many segments it has, its recording tells. The first instructions of a
/// coupled loss's plan are one `record` each.
/// \param segments of each micro-batch's tape
/// \param coupled  whether the loss is computed on the outputs of all
Plan checkpoint_plan(std::vector<int64_t> micro_batch_sizes, const std::vector<int64_t>& segments,
                     bool coupled, bool penalty);

/// Micro-batches that do both passes one after the other, with a stand-in for the gradient of their
/// outputs: a rehearsal, in which they are measured.
/// \param offloads_graphs their graphs are kept, and offloaded, in place of a second forward
Plan rehearsal_plan(std::vector<int64_t> micro_batch_sizes, bool offloads_graphs = false);

/// What a micro-batch does in a stream, in order.
const std::vector<Operation>& stream_operations();

}  // namespace infinitybatch
