#include "step/boundary_choice.hpp"

#include "core/out_of_memory.hpp"
#include "step/kept_boundaries.hpp"

#include <infinitybatch/core/errors.hpp>

#include <algorithm>
#include <bit>
#include <exception>
#include <string>

namespace infinitybatch {
namespace {

/// Closer times change places from one rehearsal to the next.
constexpr double kWorthIt = 0.9;

/// Whether larger micro-batches may take clearly less than those of the plan for each sample: as
/// these do beside those of half the size, or where they are the smallest that were timed.
bool gains_by_size(const Plan& plan) {
  constexpr double kGain = 1.1;
  const int64_t size = plan.micro_batch_size();
  double chosen = 0;
  double smaller = 0;  // of the largest that is at most half as large
  for (const Candidate& each : plan.candidates) {
    if (!each.seconds_per_sample) continue;
    if (each.micro_batch_size == size) chosen = *each.seconds_per_sample;
    if (2 * each.micro_batch_size <= size) smaller = *each.seconds_per_sample;
  }
  return chosen > 0 && (smaller == 0 || smaller > kGain * chosen);
}

std::string rehearsals_took(double one, const char* way, double other, const char* other_way) {
  return ": rehearsals of a step took " + format_seconds(one) + way + format_seconds(other) +
         other_way;
}

}  // namespace

bool BoundaryChoice::choose(Strategy& strategy) {
  const bool possible = memory.boundaries && !options.micro_batch_size &&
                        options.offload.when != Offload::When::always &&
                        strategy.cuts == Strategy::Cuts::whole_batch_ops;
  if (!possible) return false;
  // Ever new lengths follow the plan of others, and are not rehearsed.
  if (!strategy.offloads() && !memory.boundaries->timed()) return false;
  if (planner.settled_for(request(strategy)) && is_compared(strategy)) return false;
  // More may be live than when it settled, or samples of other shapes were planned for since.
  if (!plans(strategy) || planner.follows_longer() || is_compared(strategy)) return false;
  memory.compared.insert(compared_now(strategy));
  const std::optional<double> before = planner.plan().predicted_seconds;
  if (!strategy.offloads() && !before) return false;
  memory.what_compared.clear();
  Strategy other = strategy;
  if (strategy.offloads()) {
    if (!choose_beside_offload(other, before)) return true;
  } else {
    const double seconds = rehearse_larger(other, *before);
    if (other.kept == strategy.kept) return true;
    memory.what_compared = "this leaves room for larger micro-batches" +
                           rehearsals_took(seconds, " with them, ", *before, " with smaller ones");
  }
  strategy = other;
  memory.offloads = false;
  memory.kept = strategy.kept;
  if (plans(strategy)) memory.compared.insert(compared_now(strategy));
  return true;
}

bool BoundaryChoice::plans(const Strategy& strategy) {
  planner.begin_rehearsal(request(strategy));
  return !planner.nothing_fits() && planner.settled() &&
         planner.foresees_whole_loss(planner.plan());
}

KnownMemory::Compared BoundaryChoice::compared_now(const Strategy& strategy) const {
  const auto about = [](int64_t size) { return std::bit_width(static_cast<uint64_t>(size)); };
  return {strategy.offloads(), about(samples), about(planner.chosen_size())};
}

bool BoundaryChoice::is_compared(const Strategy& strategy) const {
  return memory.compared.contains(compared_now(strategy));
}

bool BoundaryChoice::choose_beside_offload(Strategy& strategy,
                                           const std::optional<double>& offloaded) {
  strategy.offload = Strategy::Offloads::nothing;
  const std::optional<double> recomputed = rehearse_fewer(strategy);
  if (!recomputed) {
    memory.what_compared =
        "boundary activations are offloaded: no plan that computes some of them again fits";
    return false;
  }
  const bool offload = !offloaded || *recomputed > kWorthIt * *offloaded;
  memory.what_compared =
      std::string("boundary activations are ") +
      (offload ? "offloaded, not computed again" : "computed again, not offloaded") +
      rehearsals_took(offloaded.value_or(0), " with copies, ", *recomputed, " without");
  return !offload;
}

std::optional<double> BoundaryChoice::rehearse_fewer(Strategy& strategy) {
  constexpr int kTries = 4;  // estimates fall short by little
  try {
    planner.begin(request(strategy));  // that all do not fit is what it knows
  } catch (const BudgetExceeded&) {
  }
  for (int i = 0; i < kTries; ++i) {
    if (!keep_fewer(strategy.kept, {*memory.boundaries, planner, samples, budget})) break;
    if (const auto seconds = rehearsed(strategy)) return rehearse_larger(strategy, *seconds);
  }
  return std::nullopt;
}

double BoundaryChoice::rehearse_larger(Strategy& strategy, double seconds) {
  while (gains_by_size(planner.plan())) {
    const std::optional<double> less = with_larger(strategy, seconds);
    if (!less) break;
    seconds = *less;
  }
  return seconds;
}

std::optional<double> BoundaryChoice::with_larger(Strategy& strategy, double seconds) {
  const int64_t now = planner.plan().micro_batch_size();
  if (2 * now > samples) return std::nullopt;
  KeptBoundaries tried = strategy.kept;
  for (int64_t size = std::max(2 * now, fair_size(samples)); size >= 2 * now; size /= 2) {
    if (!plans(strategy)) return std::nullopt;
    Strategy larger = strategy;
    BoundaryShortage shortage{*memory.boundaries, planner, samples, budget};
    shortage.size = size;
    if (!keep_fewer(larger.kept, shortage) || larger.kept == tried) continue;
    tried = larger.kept;
    const std::optional<double> less = rehearsed(larger);
    if (!less || *less > kWorthIt * seconds || planner.plan().micro_batch_size() <= now) continue;
    strategy = larger;
    return less;
  }
  return std::nullopt;
}

std::optional<double> BoundaryChoice::rehearsed(const Strategy& strategy) {
  constexpr int kRounds = 4;  // of a small batch not every size is timed in one rehearsal
  try {
    planner.begin(request(strategy));
    planner.plan_alone();  // what is compared is measured
    for (int round = 0; round < kRounds; ++round) {
      rehearse(strategy);
      if (planner.nothing_fits()) return std::nullopt;
      planner.begin(request(strategy));
      if (planner.settled()) break;
    }
    return planner.plan().predicted_seconds;
  } catch (const BudgetExceeded&) {
  } catch (...) {
    if (!is_out_of_memory(std::current_exception())) throw;
  }
  return std::nullopt;
}

}  // namespace infinitybatch
