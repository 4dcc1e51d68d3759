#include "plan/prediction.hpp"

#include "execute/schedule.hpp"
#include "execute/simulator.hpp"
#include "plan/largest.hpp"
#include "plan/packing.hpp"
#include "plan/plans.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace infinitybatch::plan {
namespace {

// Layers may refuse a single sample.
constexpr int64_t kFewestApart = 2;
// What is told by the difference of two timings is not told well: less of a micro-batch is not
// worth another one.
constexpr double kLeastPart = 0.25;
// Parts of a micro-batch among which one is chosen: what is live before a step may differ by a few
// bytes from step to step, and a micro-batch of another size is another program to compile.
constexpr int64_t kParts = 8;

}  // namespace

int64_t Prediction::peak(int64_t size) const {
  const double above = learned_.profile ? simulated_above(size) : bound_above(size);
  const int64_t peak =
      request_.baseline_bytes + static_cast<int64_t>(std::ceil(above * correction(size)));
  return std::min(peak, measured_step(size).value_or(peak));
}

bool Prediction::was_refused(int64_t size) const {
  const int64_t room = request_.budget_bytes + request_.reserved_bytes - request_.baseline_bytes;
  return std::any_of(learned_.refused.begin(), learned_.refused.end(), [&](const auto& each) {
    return each.first <= size && room - room / 16 <= each.second;
  });
}

std::optional<int64_t> Prediction::measured_step(int64_t size) const {
  // A step that joins outputs is measured up to there.
  if (learned_.irregular || request_.packing || request_.joins_streamed) return std::nullopt;
  const auto found = learned_.steps.find({request_.batch_size, size});
  if (found == learned_.steps.end()) return std::nullopt;
  return request_.baseline_bytes + found->second;
}

double Prediction::correction(int64_t size) const {
  const std::map<int64_t, double>& ratios = learned_.ratios;
  if (!request_.measured || request_.two_pass || ratios.empty()) return learned_.correction;
  // What is once, or rounded, is a smaller share of a larger size: a factor falls with the size.
  const auto above = ratios.upper_bound(size);
  return above == ratios.begin() ? above->second : std::prev(above)->second;
}

double Prediction::simulated_above(int64_t size) const {
  if (!request_.two_pass) return streamed_above(size);
  const bool overlap = request_.offloads_graphs && !learned_.shortages.in_turn();
  const int64_t above = two_pass_above(size, /*kept=*/0, overlap);
  if (!request_.rehearses_sizes() || whole_loss(static_cast<size_t>(request_.count_under(size))))
    return static_cast<double>(above);
  // Until a loss has been seen a size is rehearsed first, where its outputs have a gradient.
  const Plan rehearsed = measured_plan(request_, {size});
  const int64_t alone = simulate_peak(rehearsed, *learned_.profile, /*baseline=*/0);
  return static_cast<double>(std::max(above, alone));
}

int64_t Prediction::two_pass_above(int64_t size, int64_t kept, bool overlap) const {
  const auto simulate = [&] {
    return simulated(two_pass_plan(request_, size, kept, overlap)) - request_.baseline_bytes;
  };
  if (!request_.packing) return simulate();
  const Effect loss =
      whole_loss(static_cast<size_t>(request_.count_under(size))).value_or(Effect());
  return request_.packing->remembered({size, kept, overlap, loss.rise, loss.net}, simulate);
}

double Prediction::streamed_above(int64_t size) const {
  const auto simulate = [&](Plan plan) {
    plan.batch_size = request_.batch_size;  // whose outputs are joined
    plan.instructions.push_back({Operation::whole_loss});
    return simulate_peak(plan, *learned_.profile, /*baseline=*/0, /*begun=*/false,
                         request_.joins_streamed ? join_of(plan) : Effect());
  };
  const auto simulate_all = [&] {
    return simulate(streamed_plan(request_, size, /*penalty=*/false));
  };
  if (request_.packing) {  // no two micro-batches are alike
    return static_cast<double>(request_.packing->remembered({size, 0, false, 0, 0}, simulate_all));
  }
  constexpr int64_t kShort = 8;
  const int64_t count = request_.count_under(size);
  if (count <= kShort) return static_cast<double>(simulate_all());
  // From the second micro-batch on all are alike: what one leaves behind (kept outputs), all leave.
  const auto alike = [&](int64_t micro_batches) {
    const std::vector<int64_t> sizes(static_cast<size_t>(micro_batches), request_.size_under(size));
    return simulate(stream_plan(sizes, /*penalty=*/false));
  };
  const int64_t longer = alike(kShort);
  return static_cast<double>(longer + (longer - alike(kShort - 1)) * (count - kShort));
}

/// Without a profile. Activations grow with the samples, and no faster: what more of them took is a
/// bound, or what the most took for each.
double Prediction::bound_alone(int64_t size) const {
  if (learned_.peaks.empty()) return 0;
  const auto larger = learned_.peaks.lower_bound(size);
  const auto& [measured, peak] =
      larger != learned_.peaks.end() ? *larger : *learned_.peaks.rbegin();
  double more = static_cast<double>(size) / static_cast<double>(measured);
  if (learned_.ragged) {
    const Lengths& lengths = learned_.lengths;
    const auto work = lengths.works.find(measured);
    more *= lengths.longest;
    more /= work != lengths.works.end() ? work->second : lengths.longest;
  }
  const double bound = static_cast<double>(peak) * std::max(1.0, more);
  return learned_.irregular ? bound * (1.0 + kIrregularMargin) : bound;
}

double Prediction::bound_above(int64_t size) const {
  if (request_.segments == 0) {
    return bound_alone(size) + (request_.two_pass ? static_cast<double>(learned_.held) : 0);
  }
  // A piece knows of its own rows alone; what waits of the others is told by its tape.
  const double others = 1.0 - static_cast<double>(size) / static_cast<double>(request_.batch_size);
  return bound_alone(size) + static_cast<double>(request_.waiting_bytes) * std::max(0.0, others);
}

bool Prediction::fits_alone(int64_t size) const {
  const auto above = static_cast<int64_t>(std::ceil(bound_alone(size)));
  return request_.baseline_bytes + above <= request_.budget_bytes;
}

bool Prediction::fits_later(int64_t size, int64_t row) const {
  if (!learned_.profile) return true;
  const int64_t baseline = request_.baseline_bytes;
  const int64_t samples = request_.packing ? request_.split(size, row).front() : size;
  const int64_t peak = simulate_peak(measured_plan(request_, {samples}, row), *learned_.profile,
                                     baseline, /*begun=*/true);
  const double above = std::ceil(static_cast<double>(peak - baseline) * correction(size));
  return baseline + static_cast<int64_t>(above) <= request_.budget_bytes;
}

int64_t Prediction::length_of_peak(const Plan& plan) const {
  int64_t most = -1;
  int64_t length = 0;
  for (size_t i = 0; i < plan.lengths.size(); ++i) {
    Plan alone = measured_plan(request_, {plan.micro_batch_sizes[i]});
    alone.lengths = {plan.lengths[i]};
    const int64_t peak = simulate_peak(alone, *learned_.profile, /*baseline=*/0, /*begun=*/true);
    if (peak <= most) continue;
    most = peak;
    length = plan.lengths[i];
  }
  return length;
}

Plan Prediction::plan(int64_t size, int64_t kept) const {
  const bool may_overlap = request_.offloaded && learned_.profile && !learned_.shortages.in_turn();
  const bool overlap =
      may_overlap && corrected(two_pass_plan(request_, size, /*kept=*/0, /*overlap=*/true)) <=
                         request_.budget_bytes;
  return two_pass_plan(request_, size, kept, overlap);
}

int64_t Prediction::kept_samples(int64_t size) const {
  if (request_.offloaded || request_.kept || !request_.keeps_graphs || !learned_.profile ||
      !whole_loss(static_cast<size_t>(request_.count_under(size))))
    return 0;
  const std::vector<int64_t> sizes = request_.split(size);
  const auto count = std::ssize(sizes);
  const auto of_last = [&](int64_t graphs) {
    return std::accumulate(sizes.end() - graphs, sizes.end(), int64_t{0});
  };
  const int64_t graphs =
      largest(0, count + 1, [&](int64_t more) { return fits_keeping(size, of_last(more)); });
  const int64_t whole = of_last(graphs);
  // A single micro-batch may be the only exact one, and more graphs than were foreseen to fit have
  // not always done so.
  const bool may_split = count > 1 && learned_.shortages.most_kept() == INT64_MAX;
  if (graphs == count || !may_split) return whole;
  return whole + kept_part(size, whole, sizes[static_cast<size_t>(count - graphs - 1)]);
}

int64_t Prediction::kept_part(int64_t size, int64_t whole, int64_t next) const {
  const double pays = std::max(kLeastPart, learned_.timings.part_that_pays(size));
  if (pays >= 1) return 0;
  const int64_t fewest = std::max(kFewestApart, request_.fails_on + 1);
  const int64_t least =
      std::max(fewest, static_cast<int64_t>(std::ceil(pays * static_cast<double>(next))));
  const int64_t grain = std::max<int64_t>(1, next / kParts);
  const auto fits = [&](int64_t grains) { return fits_keeping(size, whole + grains * grain); };
  const int64_t part = grain * largest(0, (next - fewest) / grain + 1, fits);
  return part < least ? 0 : part;
}

bool Prediction::fits_keeping(int64_t size, int64_t kept) const {
  return kept <= learned_.shortages.most_kept() &&
         request_.baseline_bytes + corrected_above(two_pass_above(size, kept, /*overlap=*/false)) <=
             request_.budget_bytes;
}

double Prediction::kept_share(int64_t size) const {
  return request_.two_pass ? kept_share(size, kept_samples(size)) : 0;
}

double Prediction::kept_share(int64_t size, int64_t kept) const {
  const auto& packing = request_.packing;
  double share = 0;
  double all = 0;
  const int64_t first_kept = request_.batch_size - kept;
  int64_t row = 0;
  for (const int64_t samples : request_.split(size)) {
    const double work = packing ? packing->work(row, samples) : static_cast<double>(samples);
    all += work;
    const int64_t of_these = std::clamp<int64_t>(row + samples - first_kept, 0, samples);
    share += work * static_cast<double>(of_these) / static_cast<double>(samples);
    // One that became two saves what the second one takes less.
    if (of_these > 0 && of_these < samples) share -= work * learned_.timings.part_that_pays(size);
    row += samples;
  }
  return std::max(0.0, share / all);
}

int64_t Prediction::simulated(const Plan& plan) const {
  return simulate_peak(plan, *learned_.profile, request_.baseline_bytes, /*begun=*/false,
                       whole_loss_of(plan), request_.outputs_offload);
}

int64_t Prediction::corrected(const Plan& plan) const {
  const int64_t baseline = request_.baseline_bytes;
  return baseline + corrected_above(simulated(plan) - baseline);
}

int64_t Prediction::corrected_above(int64_t above) const {
  return static_cast<int64_t>(std::ceil(static_cast<double>(above) * learned_.correction));
}

std::optional<Prediction::Effect> Prediction::whole_loss(size_t micro_batches) const {
  if (!request_.whole_loss) return Effect();
  return learned_.whole_loss.of({request_.batch_size, micro_batches == 1, request_.length});
}

bool Prediction::knows_whole_loss(size_t micro_batches) const {
  return !request_.whole_loss ||
         learned_.whole_loss.knows({request_.batch_size, micro_batches == 1, request_.length});
}

bool Prediction::copies_outputs(const Plan& plan) const {
  const bool several = plan.micro_batch_sizes.size() > 1;
  return learned_.profile && (request_.whole_loss || request_.joins_streamed) &&
         (several || request_.copies_one);
}

Prediction::Effect Prediction::join_of(const Plan& plan) const {
  if (!copies_outputs(plan) || request_.outputs_elsewhere) return {};
  // One output after the other, each of which is let go of in parts.
  Effect effect{largest_joined(*learned_.profile, plan), /*net=*/0};
  // All parts come back first.
  for (size_t i = 0; request_.outputs_offload && i < plan.micro_batch_sizes.size(); ++i) {
    effect.rise += outputs_of(*learned_.profile, plan, i);
  }
  return effect;
}

int64_t Prediction::held_beside_joined(const Plan& plan) const {
  const auto count = std::ssize(plan.micro_batch_sizes);
  if (!copies_outputs(plan) || plan.offloads_graphs) return 0;
  int64_t bytes = 0;
  for (int64_t i = count - plan.retained; i < count; ++i) {
    bytes += outputs_of(*learned_.profile, plan, static_cast<size_t>(i));
  }
  return bytes;
}

Prediction::Effect Prediction::whole_loss_of(const Plan& plan) const {
  const auto known = whole_loss(plan.micro_batch_sizes.size());
  if (!known) return join_of(plan);
  const int64_t held = held_beside_joined(plan);
  return {known->rise + held, known->net + held};
}

}  // namespace infinitybatch::plan
