// The part of ForwardPass that tests what the user says of an output that is one number.
#include "../execute/light_recording.hpp"
#include "wrap_forward.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/core/out_of_memory.hpp>
#include <infinitybatch/coupled/fixed_ops.hpp>
#include <infinitybatch/coupled/row_errors.hpp>
#include <infinitybatch/execute/copied_batch.hpp>
#include <infinitybatch/execute/relative_distance.hpp>
#include <infinitybatch/tape/recorder.hpp>

#include <ATen/Functions.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <string>
#include <utility>

namespace infinitybatch {

std::optional<TrialOutputs> ForwardPass::try_forward(const Batch& given, int64_t rows) {
  std::optional<TrialOutputs> tried;
  const auto run = [&](bool light) {
    aside({0, rows}, /*trial=*/true, [&] {
      const Batch inputs = wrote_inputs_ ? copied(given) : given;
      coupled::FixedOps fixed(call_->devices, rows, watch_);
      const auto call = [&] { return call_model(inputs, nullptr); };
      Batch outputs;
      if (light) {
        tape::Recorder recorder(inputs, {}, call_->devices);
        recorder.lighten(job_.device);
        outputs = run_lightly(recorder, call);
      } else {
        outputs = call();
      }
      tried = TrialOutputs{detached(outputs), fixed.foreign(), fixed.strayed()};
    });
  };
  try {
    run(/*light=*/true);
  } catch (const Unsupported&) {  // forward asks for gradients itself
    run(/*light=*/false);
  }
  return tried;
}

void ForwardPass::check_reduce(const JoinedOutputs& joined) {
  if (options_.reduce == Reduce::none || row_counts_.size() < 2) return;
  if (!exact_ || call_->cuts) return;
  const std::string kind = "reduce|" + rows_.signature + '|' + std::to_string(job_.program);
  {
    const std::lock_guard<std::mutex> lock(call_->wrapped->mutex);
    if (call_->wrapped->examined.contains(kind)) return;
  }
  std::vector<size_t> reduced;
  for (size_t i = 0; i < joined.whole.leaves().size(); ++i) {
    const Leaf& leaf = joined.whole.leaves()[i];
    if (leaf.tensor.defined() && leaf.batch_dim == Leaf::kShared && !joined.once[i]) {
      reduced.push_back(i);
    }
  }
  if (reduced.empty()) return;
  const int64_t all = std::min(rows_.size, std::max<int64_t>(2, row_counts_.front()));
  const int64_t half = all / 2;
  std::optional<TrialOutputs> whole, first, second;
  try {
    const Batch inputs = call_->micro_batch({0, all});
    whole = try_forward(inputs, all);
    first = try_forward(rows(inputs, 0, half), half);
    second = try_forward(rows(inputs, half, all), all - half);
  } catch (...) {
    const std::exception_ptr error = std::current_exception();
    if (!is_out_of_memory(error) && !coupled::may_be_of_rows(error)) throw;
    return;  // nobody can tell
  }
  if (!whole || !first || !second) return;
  if (whole->strayed || first->strayed || second->strayed) return;
  const bool mean = options_.reduce == Reduce::mean;
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
  const std::lock_guard<std::mutex> lock(call_->wrapped->mutex);
  call_->wrapped->examined.insert(kind);
}

}  // namespace infinitybatch
