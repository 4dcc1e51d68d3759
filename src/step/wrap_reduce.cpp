// The part of ForwardPass that tests what the user says of an output that is one number.
#include "core/out_of_memory.hpp"
#include "coupled/row_errors.hpp"
#include "execute/relative_distance.hpp"
#include "step/wrap_forward.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <string>
#include <utility>

namespace infinitybatch {

void ForwardPass::check_reduce(const JoinedOutputs& joined) {
  if (own_.reduce == Reduce::none || row_counts_.size() < 2) return;
  if (!exact_ || cut()) return;
  if (call_->findings.reduce_checked) return;
  std::vector<size_t> reduced;
  for (size_t i = 0; i < joined.whole.leaves().size(); ++i) {
    const Leaf& leaf = joined.whole.leaves()[i];
    if (leaf.tensor.defined() && leaf.batch_dim == Leaf::kShared && !joined.once[i]) {
      reduced.push_back(i);
    }
  }
  if (reduced.empty()) return;
  const int64_t all =
      std::min(batch_size(inputs_, "inputs"), std::max<int64_t>(2, row_counts_.front()));
  const int64_t half = all / 2;
  std::optional<TrialOutputs> whole, first, second;
  try {
    Executor& engine = call_->run->engine();
    const Batch inputs = call_->micro_batch({0, all});
    whole = engine.checks().try_forward(inputs, all);
    first = engine.checks().try_forward(rows(inputs, 0, half), half);
    second = engine.checks().try_forward(rows(inputs, half, all), all - half);
  } catch (...) {
    const std::exception_ptr error = std::current_exception();
    if (!is_out_of_memory(error) && !coupled::may_be_of_rows(error)) throw;
    return;  // nobody can tell
  }
  if (!whole || !first || !second) return;
  if (whole->strayed || first->strayed || second->strayed) return;
  const bool mean = own_.reduce == Reduce::mean;
  const double a = mean ? static_cast<double>(half) / static_cast<double>(all) : 1;
  const double b = mean ? 1 - a : 1;
  for (const size_t i : reduced) {
    const auto of = [i](const TrialOutputs& trial) { return trial.outputs.leaves()[i].tensor; };
    const at::Tensor wanted = of(*whole);
    const at::Tensor found = of(*first).mul(a).add(of(*second).mul(b)).to(wanted.scalar_type());
    if (relative_distance(wanted, found) <= rounding_of(wanted)) continue;
    const std::string name = mean ? "mean" : "sum";
    throw BatchError("outputs" + joined.whole.structure()->leaf_name(i) + " is no " + name +
                     " over samples, as reduce=\"" + name + "\" says: of " + std::to_string(all) +
                     " samples it is " + std::to_string(wanted.item<double>()) +
                     ", and its two halves give " + std::to_string(found.item<double>()) +
                     "; return one value for each sample, and let the loss reduce them");
  }
  call_->findings.reduce_checked = true;
}

}  // namespace infinitybatch
