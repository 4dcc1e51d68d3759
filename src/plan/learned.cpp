#include "plan/learned.hpp"

#include "plan/packing.hpp"
#include "plan/plans.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

namespace infinitybatch::plan {
namespace {

// Blocks of the caching allocators of CUDA, HIP and XPU.
constexpr int64_t kRounding = 512;

}  // namespace

bool WholeLoss::knows(const Of& of) const {
  const auto longer = known_.lower_bound(of);
  return longer != known_.end() && longer->first.batch_size == of.batch_size &&
         longer->first.one == of.one && (of.length > 0 || longer->first == of);
}

std::optional<WholeLoss::Effect> WholeLoss::of(const Of& of) const {
  for (const bool one : {of.one, !of.one}) {
    const Of here{of.batch_size, one, of.length};
    if (knows(here)) return known_.lower_bound(here)->second;
  }
  if (of.length == 0) return std::nullopt;
  for (const bool one : {of.one, !of.one}) {
    auto longer = known_.lower_bound({of.batch_size, one, of.length});
    if (longer == known_.begin()) continue;
    const auto& [shorter, effect] = *std::prev(longer);
    if (shorter.batch_size != of.batch_size || shorter.one != one || shorter.length == 0) continue;
    const double more = static_cast<double>(of.length) / static_cast<double>(shorter.length);
    const auto scaled = [&](int64_t bytes) {
      return static_cast<int64_t>(std::ceil(static_cast<double>(bytes) * more * more));
    };
    return Effect{scaled(effect.rise), scaled(effect.net)};
  }
  return std::nullopt;
}

std::optional<int64_t> WholeLoss::raise(const Of& of, Effect effect) {
  const auto [found, is_new] = known_.try_emplace(of, effect);
  if (is_new) return std::nullopt;
  Effect& known = found->second;
  const Effect before = known;
  known = {std::max(known.rise, effect.rise), std::max(known.net, effect.net)};
  return std::max(known.rise - before.rise, known.net - before.net);
}

void WholeLoss::tell_length(int64_t length) {
  std::map<Of, Effect> told;
  for (const auto& [of, effect] : known_) told[{of.batch_size, of.one, length}] = effect;
  known_ = std::move(told);
}

void Learned::tell_length(int64_t length) {
  if (profile) profile->tell_length(length);
  shortages.tell_in_parts(Packing::kUnit);
  timings.tell_in_parts(Packing::kUnit);
  whole_loss.tell_length(length);
  ratios.clear();
  steps.clear();
}

void Learned::learn(MicroBatchTrace trace, const Request& request) {
  if (profile) {
    if (!profile->learn(trace)) ++other_stories;
    wanted_length = 0;
    return;
  }
  // The first of all shows which gradients become buffers, and may not be among those compared.
  if (!traces.empty()) {
    trace.inherit(traces.back());
  } else if (first) {
    trace.inherit(*first);
  }
  traces.push_back(std::move(trace));
  if (traces.size() < 2) return;
  const std::vector<int64_t> sizes(probed_micro_batches(request), traces.back().size);
  profile = MicroBatchProfile::fit(traces[traces.size() - 2], traces.back(),
                                   steps_of(measured_plan(request, sizes)),
                                   request.measured ? kRounding : 1);
  irregular = !profile && traces.size() > 2;
  if (profile || irregular) traces.clear();
}

}  // namespace infinitybatch::plan
