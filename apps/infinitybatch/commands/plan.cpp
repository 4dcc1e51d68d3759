#include "commands/commands.hpp"
#include "commands/one_batch.hpp"
#include "output/describe.hpp"
#include "output/json_lines.hpp"
#include "output/numbers.hpp"
#include "output/table.hpp"
#include "output/terminal.hpp"

#include <infinitybatch/core/bytes.hpp>
#include <infinitybatch/loss/criteria.hpp>
#include <infinitybatch/step/virtual_batch.hpp>

#include <ATen/Functions.h>

#include <algorithm>

namespace infinitybatch::app {
namespace {

constexpr int kMostRehearsals = 8;

/// Gives the optimizer the state that it has from the second step on: what a training lives with. A
/// step with a learning rate of 0 on gradients of 0 changes no parameter.
std::unique_ptr<torch::optim::Optimizer> settled_optimizer(const OptimizerOptions& options,
                                                           const Network& network) {
  auto optimizer = make_optimizer({options.name, 0.0}, network.parameters());
  for (const at::Tensor& parameter : network.parameters()) {
    parameter.mutable_grad() = at::zeros_like(parameter);
  }
  optimizer->step();
  optimizer->zero_grad();
  return optimizer;
}

/// Micro-batch sizes whose time is known.
int64_t timed(const Plan& plan) {
  return std::count_if(plan.candidates.begin(), plan.candidates.end(),
                       [](const Candidate& c) { return c.seconds_per_sample.has_value(); });
}

/// Rehearses until two plans in a row are alike.
Plan settle(VirtualBatch& batch, const BatchSource& inputs, const BatchSource& targets) {
  Plan plan = batch.plan(inputs, targets);
  for (int rehearsal = 1; rehearsal < kMostRehearsals; ++rehearsal) {
    Plan next = batch.plan(inputs, targets);
    const bool alike =
        next.micro_batch_size() == plan.micro_batch_size() && timed(next) == timed(plan);
    plan = std::move(next);
    if (alike) {
      break;
    }
  }
  return plan;
}

std::string milliseconds(double seconds) {
  return fixed(1e3 * seconds, 1) + " ms";
}

void show(Terminal& terminal, const Plan& plan, const std::string& offload_place) {
  std::vector<Column> columns = {
      {"micro-batch"}, {"micro-batches"}, {"peak", 9}, {"samples/s", 9}, {"", 9, /*is_text=*/true}};
  if (plan.budget_bytes) {
    columns.insert(columns.begin() + 3, {peak_heading(terminal.is_utf8())});
  }
  const Table table(columns);
  terminal.line(table.heading());
  terminal.line(table.rule(terminal.is_utf8()));
  for (const Candidate& candidate : plan.candidates) {
    const int64_t size = candidate.micro_batch_size;
    const auto seconds = candidate.seconds_per_sample;
    std::vector<std::string> cells = {
        with_commas(size), with_commas((plan.batch_size + size - 1) / size),
        format_bytes(candidate.peak_bytes),
        seconds ? with_commas(static_cast<int64_t>(1 / *seconds)) : "-",
        size == plan.micro_batch_size() ? "<- chosen" : (candidate.feasible ? "" : "too large")};
    if (plan.budget_bytes) {
      cells.insert(cells.begin() + 3, fixed(static_cast<double>(candidate.peak_bytes) /
                                                static_cast<double>(*plan.budget_bytes),
                                            3));
    }
    terminal.line(table.row(cells));
  }
  terminal.line("");
  terminal.line("live before the step: " + format_bytes(plan.baseline_bytes) +
                "; chosen: " + with_commas(plan.micro_batch_size()) + ", " + plan.reason);
  if (plan.offloads) {
    terminal.line("offloaded and restored: " + format_bytes(plan.offloaded_bytes) + " a step, " +
                  offload_place + "; " + milliseconds(plan.offload_seconds.hidden) +
                  " of its copies behind compute, " + milliseconds(plan.offload_seconds.waited) +
                  " waited for");
    if (const auto& next = plan.predicted_offload_seconds) {
      terminal.line("predicted for a step: " + milliseconds(next->hidden) + " behind compute, " +
                    milliseconds(next->waited) + " waited for");
    }
  }
}

void write(const Plan& plan, const OneBatch& work) {
  for (const Candidate& candidate : plan.candidates) {
    write_json("candidate", {{"micro_batch_size", candidate.micro_batch_size},
                             {"peak_bytes", candidate.peak_bytes},
                             {"feasible", candidate.feasible},
                             {"seconds_per_sample", to_json(candidate.seconds_per_sample)}});
  }
  std::optional<double> hidden;
  std::optional<double> waited;
  if (const auto& next = plan.predicted_offload_seconds) {
    hidden = next->hidden;
    waited = next->waited;
  }
  work.write_result("plan", {{"micro_batch_size", plan.micro_batch_size()},
                             {"micro_batch_sizes", plan.micro_batch_sizes},
                             {"baseline_bytes", plan.baseline_bytes},
                             {"strategy", plan.strategy},
                             {"segments", plan.segments},
                             {"offloads", plan.offloads},
                             {"offload_overlapped", plan.overlaps},
                             {"offloaded_bytes", plan.offloaded_bytes},
                             {"offload_seconds_hidden", plan.offload_seconds.hidden},
                             {"offload_seconds_waited", plan.offload_seconds.waited},
                             {"predicted_offload_seconds_hidden", to_json(hidden)},
                             {"predicted_offload_seconds_waited", to_json(waited)},
                             {"predicted_peak_bytes", to_json(plan.predicted_peak_bytes)},
                             {"predicted_seconds", to_json(plan.predicted_seconds)},
                             {"reason", plan.reason}});
}

}  // namespace

ExitCode run_plan(Settings settings) {
  OneBatch work(settings);
  const auto optimizer = settled_optimizer(settings.training.optimizer, work.network());
  VirtualBatch batch(work.model(), losses::cross_entropy(), work.options());
  const Plan plan = settle(batch, work.inputs(), work.targets());
  show(work.terminal(), plan, offload_place(settings.training.step, settings.training.device));
  if (work.json()) write(plan, work);
  return ExitCode::ok;
}

}  // namespace infinitybatch::app
