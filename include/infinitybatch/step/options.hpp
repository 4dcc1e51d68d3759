#pragma once

#include <infinitybatch/core/micro_batch.hpp>
#include <infinitybatch/memory/budget.hpp>
#include <infinitybatch/step/batch_dim.hpp>
#include <infinitybatch/step/trim_padding.hpp>

#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace infinitybatch {

/// What to do where a layer combines the samples of a batch (BatchNorm in training).
enum class BatchCoupling {
  exact,            ///< the gradient of the whole batch, or a typed error
  per_micro_batch,  ///< let each micro-batch be a batch of its own, as gradient accumulation does
};

/// Where what waits at the cuts of tapes goes: an arena on the host, and beyond it an anonymous
/// file on disk, which is gone with the process however that ends.
struct Offload {
  enum class When : uint8_t {
    automatic,  ///< where no plan fits otherwise
    always,     ///< wherever tapes are cut, or outputs wait for a coupled loss; graphs if that pays
    never,      ///< one sample that does not fit computes it again instead, which takes time that
                ///< grows with the square of its depth; of a whole batch some of what waits
                ///< is computed again, which is one forward more at most
  };
  When when = When::automatic;
  /// What the arena may take of the host's memory. Nothing: half of what is available, and on the
  /// CPU, where the host is the device, none.
  std::optional<memory::Budget> host_budget = {};
  bool disk = true;
  std::string directory = {};  ///< of the file; empty: $TMPDIR, else /var/tmp
  /// On the CPU, to find out what a link to a device would cost: the arena's copies take at least
  /// their bytes divided by this, in bytes per second. 0: as fast as they go.
  double host_bandwidth = 0;
};

/// How a VirtualBatch and a Wrap run their model. Without a budget and without a size the budget is
/// "auto". All members are initialised, so that leaving one out is no warning. A new one is named
/// in `for_each_option` (src/step/options.hpp) too, and in Python where a test asks for it.
struct Options {
  /// Bytes that tensors may occupy on the device during `backward` (of a Wrap: during forward and
  /// during backward); see `memory::Budget`. What is there before counts, and so does what the
  /// caller's loss allocates between forward and backward of a Wrap.
  std::optional<memory::Budget> memory_budget = {};
  /// Samples that are computed at once; skips planning. The last micro-batch may be smaller. A
  /// budget given beside it is kept, or BudgetExceeded is thrown.
  std::optional<int64_t> micro_batch_size = {};
  /// With `trim`: positions that are computed at once, rows times the longest of them, of all
  /// sequences. Alone or beside `micro_batch_size`, which then is the most rows; skips planning.
  std::optional<int64_t> micro_batch_tokens = {};
  /// How padding is marked, one for each sequence: rows are sorted by length, and each micro-batch
  /// is computed at the length of its longest row. Of batches that are given as tensors.
  std::vector<TrimPadding> trim = {};
  /// Along which dimension samples lie in inputs and targets (1 for [time, batch, ...]), where they
  /// are not marked themselves; without it along the first. Of several places for each sample, as
  /// where a model flattens time and batch, targets do the same: [time * batch]. Of batches that
  /// are given as tensors; a BatchSource marks its rows.
  std::optional<BatchDim> batch_dim = {};
  /// With a given `micro_batch_size` and a coupled loss, BatchNorm or a Wrap: micro-batches that
  /// keep their graph from the first forward on, so that they need no second one. Behind a Wrap
  /// none does where ops see the whole batch. Without a size the plan decides.
  int64_t retained_micro_batches = 0;
  /// Forwards are recorded, and second forwards replay them. False: they run the model again, which
  /// gives the same gradient. Tapes that are cut, where ops see the whole batch, are recorded and
  /// replayed all the same.
  bool use_tapes = true;
  /// Promises that what forward does depends on shapes only, as in DDP: it is recorded once for
  /// each number of rows, checked on a second micro-batch, and then its tape is used again, in
  /// later steps too. User code, hooks on modules and Python's random numbers are skipped.
  /// Recordings of a Wrap in front of a backward, and without one, are others.
  bool static_graph = false;
  /// With `micro_batch_size`, for any loss: the graph of a micro-batch is never there as a whole.
  /// Its tape, or each stretch of it between ops that see the whole batch, is cut into about as
  /// many segments (at least 2), which are played again one after the other, last first. A plan
  /// for a `memory_budget` does so by itself where one sample does not fit. Not for a Wrap.
  std::optional<int64_t> checkpoint_segments = {};
  /// Whether dropout, rand, randn and their like give the numbers that the whole batch's run would
  /// draw from the same generator, which is left where that run leaves it. Tapes are cut in front
  /// of each op that draws. Otherwise each micro-batch draws as a batch of its own.
  bool match_native_rng = false;
  BatchCoupling batch_coupling = BatchCoupling::exact;
  /// Where what waits at the cuts of tapes goes when the device is full, and the graphs of
  /// `retained_micro_batches`. Behind a Wrap without a budget only `always` does anything; under a
  /// budget without a size it keeps the graphs of all micro-batches away from the device, in place
  /// of second forwards, as long as there is room for them. All calls of one Wrap share one store,
  /// one thread at a time.
  Offload offload = {};
  /// Keep the outputs of all micro-batches and return them, detached, in the report. Not for a
  /// Wrap, which returns them anyway.
  bool keep_outputs = false;
  /// Called after each micro-batch's loss, for metrics that need outputs. Behind a Wrap after its
  /// forward, without targets. What is computed again after running out of memory is shown again.
  std::function<void(const MicroBatch&)> on_micro_batch = {};
  /// Multiplies the gradients, not the reported loss: a gradient scaler's scale. A 0-dimensional
  /// tensor on the model's device, asked once per step. Not for a Wrap, whose loss is the caller's.
  std::function<at::Tensor()> loss_scale = {};
  /// Called between micro-batches; may throw to abandon the step (Ctrl-C in bindings).
  std::function<void()> interrupt = {};
};

}  // namespace infinitybatch
