#include "plan/learned.hpp"

#include "plan/plans.hpp"

#include <algorithm>
#include <utility>

namespace infinitybatch::plan {
namespace {

// Blocks of the caching allocators of CUDA, HIP and XPU.
constexpr int64_t kRounding = 512;

}  // namespace

std::optional<WholeLoss::Effect> WholeLoss::of(int64_t batch_size, bool one) const {
  for (const bool measured : {one, !one}) {
    const auto found = known_.find({batch_size, measured});
    if (found != known_.end()) return found->second;
  }
  return std::nullopt;
}

bool WholeLoss::raise(int64_t batch_size, bool one, Effect effect) {
  const auto [found, is_new] = known_.try_emplace({batch_size, one}, effect);
  Effect& known = found->second;
  if (!is_new && effect.rise <= known.rise && effect.net <= known.net) return false;
  known = {std::max(known.rise, effect.rise), std::max(known.net, effect.net)};
  return true;
}

void Learned::learn(MicroBatchTrace trace, const Request& request) {
  // The first of all shows which gradients become buffers, and may not be among those compared.
  if (!traces.empty()) trace.inherit(traces.back());
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
