#include <infinitybatch/step/bench.hpp>

#include "commands/commands.hpp"
#include "commands/one_batch.hpp"
#include "output/json_lines.hpp"

#include <infinitybatch/loss/criteria.hpp>

namespace infinitybatch::app {
namespace {

nlohmann::ordered_json ratio_fields(const Ratio& ratio) {
  return {{"lower", ratio.lower}, {"median", ratio.median}, {"upper", ratio.upper}};
}

void write(const BenchReport& report, const OneBatch& work) {
  for (const StrategyTimes& times : report.strategies) {
    nlohmann::ordered_json fields = {{"name", times.name}, {"timed", times.timed()}};
    if (times.timed()) {
      fields.update({{"strategy", times.strategy},
                     {"micro_batch_sizes", times.micro_batch_sizes},
                     {"peak_bytes", times.peak_bytes},
                     {"cpu_seconds", times.cpu_seconds},
                     {"wall_seconds", times.wall_seconds},
                     {"cpu", ratio_fields(times.cpu)},
                     {"wall", ratio_fields(times.wall)}});
    } else {
      fields["why_not"] = times.why_not;
    }
    write_json("strategy", fields);
  }
  work.write_result("bench", {{"reference", report.reference},
                              {"rounds", report.rounds},
                              {"live_bytes", report.live_bytes}});
}

}  // namespace

ExitCode run_bench(Settings settings) {
  const BenchOptions how = settings.bench;
  OneBatch work(std::move(settings));
  const BenchReport report = bench(work.model(), losses::cross_entropy(), work.inputs(),
                                   work.targets(), work.options(), how);
  work.tell(report.explain());
  if (work.json()) write(report, work);
  return ExitCode::ok;
}

}  // namespace infinitybatch::app
