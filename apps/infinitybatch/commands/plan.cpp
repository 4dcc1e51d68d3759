#include <infinitybatch/core/bytes.hpp>
#include <infinitybatch/loss/criteria.hpp>
#include <infinitybatch/step/module.hpp>
#include <infinitybatch/step/virtual_batch.hpp>

#include <ATen/Context.h>
#include <ATen/Functions.h>

#include <algorithm>

#include "commands/commands.hpp"
#include "interrupt.hpp"
#include "output/describe.hpp"
#include "output/json_lines.hpp"
#include "output/numbers.hpp"
#include "output/table.hpp"
#include "output/terminal.hpp"

namespace infinitybatch::app {
namespace {

using Json = nlohmann::ordered_json;

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

void show(Terminal& terminal, const Plan& plan) {
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
}

void write(const Plan& plan, Json job) {
  const auto bytes = [](const auto& value) { return value ? Json(*value) : Json(); };
  for (const Candidate& candidate : plan.candidates) {
    write_json("candidate", {{"micro_batch_size", candidate.micro_batch_size},
                             {"peak_bytes", candidate.peak_bytes},
                             {"feasible", candidate.feasible},
                             {"seconds_per_sample", bytes(candidate.seconds_per_sample)}});
  }
  job.update({{"micro_batch_size", plan.micro_batch_size()},
              {"micro_batch_sizes", plan.micro_batch_sizes},
              {"baseline_bytes", plan.baseline_bytes},
              {"predicted_peak_bytes", bytes(plan.predicted_peak_bytes)},
              {"predicted_seconds", bytes(plan.predicted_seconds)},
              {"reason", plan.reason}});
  write_json("plan", job);
}

}  // namespace

ExitCode run_plan(Settings settings) {
  watch_for_interrupts();
  const auto& training = settings.training;
  const Dataset data = load_dataset(settings.data, settings.model.context);
  at::manual_seed(training.seed);
  const std::shared_ptr<Network> network = make_network(settings.model, data);
  network->to(training.device);
  const auto optimizer = settled_optimizer(training.optimizer, *network);

  Terminal terminal(settings.json ? stderr : stdout);
  for (const std::string& line : describe_job(data, settings, *network)) {
    terminal.line(line);
  }
  terminal.line("");

  Options options;
  if (training.step.memory_budget) {
    options.memory_budget = memory::Budget(*training.step.memory_budget);
  }
  options.interrupt = check_interrupt;
  VirtualBatch batch(make_model(network), losses::cross_entropy(), options);
  const at::Tensor order = at::arange(batch_size_for(training.step, data), at::kLong);
  const Plan plan =
      settle(batch, source_of(data.train.inputs, order), source_of(data.train.targets, order));
  show(terminal, plan);
  if (settings.json) {
    write(plan, job_as_json(data, settings, *network));
  }
  return ExitCode::ok;
}

}  // namespace infinitybatch::app
