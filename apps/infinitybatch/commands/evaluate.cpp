#include "train/evaluate.hpp"
#include "train/metrics.hpp"

#include "commands/commands.hpp"
#include "commands/saved_model.hpp"
#include "interrupt.hpp"
#include "output/json_lines.hpp"
#include "output/numbers.hpp"
#include "output/terminal.hpp"

#include <infinitybatch/core/bytes.hpp>
#include <infinitybatch/memory/limit.hpp>
#include <infinitybatch/memory/statistics.hpp>

#include <optional>

namespace infinitybatch::app {

ExitCode run_evaluate(const Settings& settings) {
  watch_for_interrupts();
  const auto saved = open_saved_model(settings);
  const c10::Device device = settings.training.device;
  const auto& budget = settings.training.step.memory_budget;
  std::optional<memory::Limit> limit;
  if (budget) limit.emplace(*budget, device);
  const memory::PeakScope peak(device);
  Scores all;
  Metrics metrics(settings.training.metrics);
  const auto each = [&](const MicroBatch& rows) { metrics.add(rows); };
  for (const Split* split : saved->splits) {
    const Scores scores = evaluate(saved->network, *split, slice_of(settings), each);
    const double share = static_cast<double>(split->size) / static_cast<double>(saved->size());
    all.loss += scores.loss * share;
    all.accuracy += scores.accuracy * share;
  }
  const auto values = metrics.values(all.loss);
  std::string more;
  for (const auto& [name, value] : values) more += ", " + name + " " + fixed(value, 4);
  Terminal terminal(settings.json ? stderr : stdout);
  if (!saved->same_data) terminal.line(kOtherData);
  terminal.line(settings.file + " on " + with_commas(saved->size()) + " samples of " +
                saved->data.name + " (" + saved->samples + "): loss " + fixed(all.loss, 4) +
                ", accuracy " + fixed(100 * all.accuracy, 1) + " %" + more + ", peak " +
                format_bytes(peak.peak()));
  if (settings.json) {
    nlohmann::ordered_json fields = {
        {"file", settings.file},    {"model", saved->description.model.model},
        {"data", saved->data.name}, {"of", saved->samples},
        {"samples", saved->size()}, {"loss", all.loss},
        {"accuracy", all.accuracy}, {"same_data", saved->same_data},
        {"peak_bytes", peak.peak()}};
    for (const auto& [name, value] : values) fields["metrics"][name] = value;
    write_json("evaluate", fields);
  }
  return ExitCode::ok;
}

}  // namespace infinitybatch::app
