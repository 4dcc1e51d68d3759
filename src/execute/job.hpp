#pragma once

#include "core/row_range.hpp"
#include "coupled/renormed_weights.hpp"

#include <infinitybatch/core/batch_source.hpp>
#include <infinitybatch/core/micro_batch.hpp>
#include <infinitybatch/core/model.hpp>
#include <infinitybatch/loss/coupled.hpp>
#include <infinitybatch/loss/loss.hpp>

#include <functional>

namespace infinitybatch {

struct Findings;
struct StaticTapes;
class Checkpoints;
class OutsideLoss;
namespace offload {
class Store;
}

/// Everything that stays the same while one logical batch is computed.
struct Job {
  const Model* model = nullptr;
  const SeparableLoss* loss = nullptr;  ///< one of the two is set
  const CoupledLoss* coupled = nullptr;
  OutsideLoss* outside = nullptr;  ///< with `cut`, in place of both: the loss is somebody else's
  const BatchSource* inputs = nullptr;
  const BatchSource* targets = nullptr;
  std::vector<NamedParameter> parameters;
  std::vector<BufferSlot> buffers;
  at::Device device = at::kCPU;
  std::vector<at::Device> further_devices;  ///< whose generators forward may draw from, too
  bool training = true;  ///< the model's mode
  int64_t program = 0;   ///< which one forward is set to run; see `Programs`
  bool exact_coupling = true;
  bool keep_outputs = false;
  bool cut = false;                     ///< tapes are cut where ops see the whole batch
  StaticTapes* static_tapes = nullptr;  ///< with `cut`: tapes to use again
  Checkpoints* checkpoints = nullptr;   ///< with `cut`: tapes are cut for memory, too
  bool alone = false;                   ///< then: nothing sees the whole batch, each
                                        ///< micro-batch goes through its tape by itself
  offload::Store* store = nullptr;      ///< where what waits at the cuts goes, and outputs
  bool offloads_graphs = false;         ///< and graphs that are kept for a coupled loss
  bool waits = false;                   ///< for the device after each instruction, to time it
  bool match_native_rng = false;        ///< random numbers are those of the whole batch's run
  coupled::RenormedMemory* renormed = nullptr;  ///< what is known of `max_norm`; may be null
  Findings* findings = nullptr;  ///< about this kind of batch; never null while a step runs
  bool rehearses = false;        ///< sizes are measured: nothing is handed out, nor looked at
  bool use_tapes = true;         ///< false: a second forward always runs the user's code
  bool tapes_failed = false;     ///< then: because a replay gave other outputs
  bool tapes_stay = false;       ///< what a recording keeps is held beyond its replay
  std::function<void(const MicroBatch&)> on_micro_batch;
  bool nested = false;    ///< may run inside another step of this thread
  at::Tensor loss_scale;  ///< undefined means 1
  std::function<void()> interrupt;

  int64_t batch_size() const noexcept { return inputs->size; }
  /// Whether the recording of these rows has to tell how outputs follow them.
  bool learns_output_law(Rows rows) const;
  /// Whether recordings are asked whether ordinary ops mix samples, where that is not known.
  bool asks_for_mixing() const noexcept { return exact_coupling && use_tapes; }
  /// Whether the recording of these rows has to tell that.
  bool examines(Rows rows) const;
  bool looks_at_rows() const noexcept { return exact_coupling && !rehearses; }
};

/// Rows beside these `rows`, another number of them, whose forward tells what follows the samples.
Rows other_rows(Rows rows, int64_t batch_size);

/// The devices whose random generators a step may draw from.
std::vector<at::Device> devices_of(const Job& job);

}  // namespace infinitybatch
