#include <infinitybatch/loss/criteria.hpp>
#include <infinitybatch/step/module.hpp>
#include <infinitybatch/step/verify.hpp>

#include <ATen/Context.h>
#include <ATen/Functions.h>

#include <sstream>

#include "commands/commands.hpp"
#include "interrupt.hpp"
#include "output/describe.hpp"
#include "output/json_lines.hpp"
#include "output/terminal.hpp"

namespace infinitybatch::app {
namespace {

using Json = nlohmann::ordered_json;

void write(const Comparison& comparison) {
  for (const ParameterError& parameter : comparison.parameters) {
    write_json("parameter", {{"name", parameter.name},
                             {"type", c10::toString(comparison.type)},
                             {"error", parameter.error},
                             {"allowed", parameter.allowed},
                             {"exact", parameter.error <= parameter.allowed}});
  }
}

void write(const VerifyReport& report, Json job) {
  if (report.in_fp64) write(*report.in_fp64);
  write(report.own);
  job.update({{"exact", report.exact()},
              {"rows", report.rows},
              {"strategy", report.strategy},
              {"micro_batch_sizes", report.micro_batch_sizes},
              {"why_no_fp64", report.why_no_fp64},
              {"coupled_output", report.coupled_output ? Json(*report.coupled_output) : Json()}});
  write_json("verify", job);
}

}  // namespace

ExitCode run_verify(Settings settings) {
  watch_for_interrupts();
  const auto& training = settings.training;
  const Dataset data = load_dataset(settings.data, settings.model.context);
  at::manual_seed(training.seed);
  const std::shared_ptr<Network> network = make_network(settings.model, data);
  network->to(training.device);

  Terminal terminal(settings.json ? stderr : stdout);
  for (const std::string& line : describe_job(data, settings, *network)) terminal.line(line);
  terminal.line("");

  Options options;
  if (training.step.memory_budget) {
    options.memory_budget = memory::Budget(*training.step.memory_budget);
  }
  options.micro_batch_size = training.step.micro_batch_size;
  options.interrupt = check_interrupt;
  const at::Tensor order = at::arange(batch_size_for(training.step, data), at::kLong);
  const VerifyReport report =
      verify(make_model(network), losses::cross_entropy(), source_of(data.train.inputs, order),
             source_of(data.train.targets, order), options);
  std::istringstream lines(report.explain());
  for (std::string line; std::getline(lines, line);) terminal.line(line);
  if (settings.json) write(report, job_as_json(data, settings, *network));
  return report.exact() ? ExitCode::ok : ExitCode::error;
}

}  // namespace infinitybatch::app
