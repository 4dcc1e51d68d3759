#include <infinitybatch/core/bytes.hpp>
#include <infinitybatch/step/bench.hpp>

#include <algorithm>
#include <cstdio>

namespace infinitybatch {
namespace {

std::string describe(const Ratio& ratio) {
  char text[64];
  std::snprintf(text, sizeof text, "%.3f [%.3f, %.3f]", ratio.median, ratio.lower, ratio.upper);
  return text;
}

std::string row(const std::string& name, const std::string& size, const std::string& cpu,
                const std::string& wall, const std::string& peak) {
  char text[160];
  std::snprintf(text, sizeof text, "%-12s %11s  %-21s  %-21s  %s", name.c_str(), size.c_str(),
                cpu.c_str(), wall.c_str(), peak.c_str());
  std::string line = text;
  line.erase(line.find_last_not_of(' ') + 1);
  return line + "\n";
}

}  // namespace

std::string BenchReport::explain() const {
  std::string text = std::to_string(batch_size) + " samples, " + std::to_string(rounds) +
                     " rounds in turn; times over " + reference +
                     ": median and quartiles of the rounds' ratios\n";
  text += row("strategy", "micro-batch", "CPU of the process", "wall", "peak");
  for (const StrategyTimes& times : strategies) {
    if (!times.timed()) continue;
    const int64_t size =
        *std::max_element(times.micro_batch_sizes.begin(), times.micro_batch_sizes.end());
    text += row(times.name, std::to_string(size), describe(times.cpu), describe(times.wall),
                format_bytes(times.peak_bytes));
  }
  for (const StrategyTimes& times : strategies) {
    if (!times.timed()) {
      text += times.name + " was not timed: " + times.why_not + "\n";
    } else if (times.strategy == "rerun" && times.name != "rerun") {
      text += times.name + " ran the model twice: no tape of it can be believed\n";
    }
  }
  return text;
}

}  // namespace infinitybatch
