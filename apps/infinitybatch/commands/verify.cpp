#include <infinitybatch/step/verify.hpp>

#include "commands/commands.hpp"
#include "commands/one_batch.hpp"
#include "output/json_lines.hpp"

#include <infinitybatch/loss/criteria.hpp>

#include <vector>

namespace infinitybatch::app {
namespace {

void write(const Comparison& comparison) {
  const auto each = [&](const char* event, const std::vector<ParameterError>& errors) {
    for (const ParameterError& found : errors) {
      write_json(event, {{"name", found.name},
                         {"type", c10::toString(comparison.type)},
                         {"error", found.error},
                         {"allowed", found.allowed},
                         {"exact", found.error <= found.allowed}});
    }
  };
  each("parameter", comparison.parameters);
  each("buffer", comparison.buffers);
}

void write(const VerifyReport& report, const OneBatch& work) {
  if (report.in_fp64) write(*report.in_fp64);
  write(report.own);
  work.write_result("verify", {{"exact", report.exact()},
                               {"rows", report.rows},
                               {"strategy", report.strategy},
                               {"micro_batch_sizes", report.micro_batch_sizes},
                               {"why_no_fp64", report.why_no_fp64},
                               {"coupled_output", to_json(report.coupled_output)}});
}

}  // namespace

ExitCode run_verify(Settings settings) {
  OneBatch work(std::move(settings));
  const VerifyReport report =
      verify(work.model(), losses::cross_entropy(), work.inputs(), work.targets(), work.options());
  work.tell(report.explain());
  if (work.json()) write(report, work);
  return report.exact() ? ExitCode::ok : ExitCode::error;
}

}  // namespace infinitybatch::app
