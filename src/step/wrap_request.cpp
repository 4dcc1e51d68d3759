#include "step/wrap_request.hpp"

#include "execute/schedule.hpp"
#include "step/kept_boundaries.hpp"
#include "step/sorted_batch.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/memory/statistics.hpp>

#include <string>
#include <utility>

namespace infinitybatch {

Request request_of(Wrapped& wrapped, const Setup& setup, const Batch& inputs, const BatchKind& kind,
                   int64_t budget, bool with_gradients) {
  const Problem& problem = setup.problem;
  const Strategy& strategy = setup.strategy;
  Request request;
  request.signature = kind.layout + "|wants ";
  request.dims = lengths_of(*problem.inputs, *problem.targets);
  if (problem.trimming) plan_by_length(request, *problem.trimming);
  // Memory depends on whose gradients are wanted, which may change from call to call.
  const auto wants = [&](const at::Tensor& tensor) {
    request.signature += tensor.defined() && tensor.requires_grad() ? '1' : '0';
  };
  for (const Leaf& leaf : inputs.leaves()) wants(leaf.tensor);
  for (const NamedParameter& parameter : problem.parameters) wants(parameter.tensor);
  request.batch_size = problem.batch_size();
  request.baseline_bytes = memory::live(problem.device);
  request.budget_bytes = budget;
  if (with_gradients) request.gradient_bytes = gradient_bytes(problem.parameters, problem.device);
  request.two_pass = with_gradients || strategy.is_cut();
  request.copies_one = true;
  // On accelerators a bound refuses: what else a micro-batch leaves may be larger than its outputs.
  request.joins_streamed = !request.two_pass && problem.device.is_cpu();
  request.measured = !problem.device.is_cpu();
  {
    const std::lock_guard<std::mutex> lock(wrapped.mutex);
    wrapped.known.of(kind).limit(request);
  }
  request.offloaded = strategy.is_cut() ? strategy.offloads() : strategy.offloads_graphs();
  request.offloads_graphs = strategy.offloads_graphs();
  if (request.offloads_graphs) request.signature += "|graphs are offloaded";
  if (!strategy.is_cut()) return request;
  request.signature += "|cut into " + std::to_string(wrapped.segments);
  request.segments = wrapped.segments;
  // Backward takes what waits apart as it goes, so that it could not begin again without graphs.
  request.keeps_graphs = false;
  request.goes_back = with_gradients || request.offloaded;
  if (request.offloaded) request.signature += "|offloaded";
  plan_with(request, strategy.kept, wrapped.known.memory_of(kind).boundaries);
  return request;
}

Piece plan_beside_loss(Planner& planner, const Request& request) {
  Piece piece = planner.two_pass();
  if (planner.foresees_whole_loss(piece.plan)) return piece;
  Request wanted = request;
  const int64_t room = request.budget_bytes - request.baseline_bytes;
  for (int64_t left = room / 2; left > room / 64; left /= 2) {
    wanted.budget_bytes = request.budget_bytes - left;
    wanted.reserved_bytes = left;
    try {
      planner.begin(wanted);
      return planner.two_pass();
    } catch (const BudgetExceeded&) {
      // Not even the smallest micro-batches fit beside so much.
    }
  }
  planner.begin(request);
  return planner.two_pass();
}

Split given_split(const Setup& setup, const Options& options, int64_t samples) {
  const Trimming* trimming = setup.problem.trimming.get();
  const auto split = setup.strategy.is_cut() ? &split_for_cuts : &split_by;
  // Under a budget nothing is predicted of it, and backward could not begin again.
  const bool overlaps = !options.memory_budget;
  Split given{trimming != nullptr ? trimming->sizes : split(samples, *options.micro_batch_size),
              options.retained_micro_batches, overlaps};
  if (given.sizes.size() == 1 && overlaps) given.retained = 1;
  return given;
}

}  // namespace infinitybatch
