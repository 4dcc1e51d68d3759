// Where boundary activations of the whole batch do not all fit: which are kept, and whether the
// others are computed again or leave the device.
#include "core/out_of_memory.hpp"
#include "step/virtual_batch_state.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/memory/statistics.hpp>

#include <algorithm>
#include <exception>
#include <optional>
#include <string>
#include <utility>

namespace infinitybatch {

void VirtualBatch::State::learn_boundaries(const Executor& executor, const Setup& setup,
                                           Rows rows) {
  if (memory_->boundaries || setup.strategy.cuts != Strategy::Cuts::whole_batch_ops) return;
  memory_->boundaries.emplace(executor.recorded(rows), rows.size(),
                              setup.problem.loss.coupled() != nullptr);
}

void VirtualBatch::State::keep_all_boundaries(Setup& setup) {
  memory_->kept.reset();
  setup.strategy.kept.reset();
}

/// What micro-batches take beside their boundary activations grows with their size, and small ones
/// take more time: it is tried to keep so much that micro-batches of a fair size fit.
bool VirtualBatch::State::keep_fewer_boundaries(Setup& setup, int64_t budget) const {
  const plan::Boundaries& boundaries = *memory_->boundaries;
  const int64_t samples = setup.problem.batch_size();
  const int64_t fair = std::min(samples, std::max(int64_t{32}, samples / 8));
  const int64_t now = boundaries.with(setup.strategy.kept, samples).bytes;
  const auto keep = [&](int64_t bytes) {
    const auto choice = boundaries.within(std::min(bytes, now - 1), samples);
    if (choice) setup.strategy.kept = choice->kept;
    return choice.has_value();
  };
  if (options_.micro_batch_size) return keep(budget - memory::stats(setup.problem.device).live);
  for (int64_t size = fair; size > 0; size /= 2) {
    const auto peak = planner_.peak_at(size);
    if (!peak) break;
    if (keep(budget - (*peak - now))) return true;
  }
  // What is estimated here its own rehearsal knows, and says what would be enough.
  const plan::Boundaries::Choice least = boundaries.least(samples);
  if (least.bytes >= now) return false;
  setup.strategy.kept = least.kept;
  return true;
}

void VirtualBatch::State::choose_boundaries(Setup& setup, int64_t budget) {
  const bool possible = memory_->offloads && memory_->boundaries && !options_.micro_batch_size &&
                        options_.offload.when == Offload::When::automatic &&
                        setup.strategy.cuts == Strategy::Cuts::whole_batch_ops;
  if (!possible || memory_->compared || !planner_.settled_for(request(setup, budget))) return;
  memory_->compared = true;
  const std::optional<double> offloaded = planner_.plan().predicted_seconds;
  Setup recomputing = setup;
  recomputing.strategy.offload = Strategy::Offloads::nothing;
  provide(recomputing);
  const std::optional<double> recomputed = rehearse_fewer(recomputing, budget);
  if (!recomputed) {
    memory_->why_offloaded =
        "boundary activations are offloaded: computing some of them again needs "
        "more memory";
    return;
  }
  const bool offload = !offloaded || *offloaded <= *recomputed;
  memory_->why_offloaded =
      std::string("boundary activations are ") +
      (offload ? "offloaded, not computed again" : "computed again, not offloaded") +
      ": rehearsals of a step took " + format_seconds(offloaded.value_or(0)) + " with copies, " +
      format_seconds(*recomputed) + " without";
  if (offload) return;
  memory_->offloads = false;
  memory_->kept = recomputing.strategy.kept;
  setup = recomputing;
}

/// Seconds of a step that keeps what fits; nothing where nothing does.
std::optional<double> VirtualBatch::State::rehearse_fewer(Setup& setup, int64_t budget) {
  constexpr int kTries = 4;  // estimates fall short by little
  for (int i = 0; i < kTries; ++i) {
    try {
      // The first time with all: that these do not fit is what the planner knows.
      if (i > 0) rehearse(setup, budget);
      planner_.begin(request(setup, budget));
      if (i > 0) return planner_.settled() ? planner_.plan().predicted_seconds : std::nullopt;
    } catch (const BudgetExceeded&) {
    } catch (...) {
      if (!is_out_of_memory(std::current_exception())) throw;
    }
    if (!keep_fewer_boundaries(setup, budget)) break;
  }
  return std::nullopt;
}

}  // namespace infinitybatch
