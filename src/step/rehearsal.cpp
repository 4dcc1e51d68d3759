#include "step/rehearsal.hpp"

#include "core/foreign_exception.hpp"
#include "core/rng.hpp"
#include "execute/executor.hpp"
#include "execute/findings.hpp"
#include "step/meter.hpp"

#include <exception>
#include <optional>

namespace infinitybatch {

void Rehearsal::run() {
  // A small batch has too few rows to time every size in one pass over them.
  constexpr int kPasses = 8;
  const RngSnapshot random = RngSnapshot::capture(devices_of(setup.problem));
  // Strategies with and without offloading are compared.
  const bool times = setup.strategy.offloads() && !setup.strategy.is_cut();
  setup.problem.rehearses = true;
  Trimming* const trimming = setup.problem.trimming.get();
  std::optional<Executor> executor;
  const auto begin = [&] {
    executor.reset();
    if (in_front) in_front(setup);
    executor.emplace(setup);
    executor->look_for_few_rows();
  };
  try {
    for (int pass = 0; pass < kPasses; ++pass) {
      begin();
      planner.begin_rehearsal(request());
      began = true;
      while (const std::optional<Piece> piece = planner.next()) {
        const int64_t row = piece->first_row;
        if (trimming) trimming->at_least = piece->least_length;
        const Measurement measured = run_planned(*executor, *piece, row, setup.problem.device);
        planner.observe(*piece, measured);
        if (trimming) trimming->at_least = 0;
        if (times) choices.add(request(), piece->plan, executor->take_times());
        executor->checks().examine();
        after_piece(*executor, {row, row + piece->plan.micro_batch_sizes.front()}, measured);
        if (!setup.strategy.is_cut()) continue;
        // Each piece stands for a whole batch.
        setup.resources.findings->recordings_checked = true;
        executor->roll_back();
        if (setup.problem.match_native_rng) random.restore();
        begin();
      }
      executor->roll_back();
      executor.reset();
      random.restore();
      if (planner.settled()) break;
    }
  } catch (...) {
    keep_foreign_exception(std::current_exception());
    if (executor) {
      coupled_beyond_cuts = executor->coupled_beyond_cuts();
      failed_rows = executor->failed_rows();
      executor->roll_back();
    }
    executor.reset();
    random.restore();
    throw;
  }
}

}  // namespace infinitybatch
