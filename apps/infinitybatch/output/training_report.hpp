#pragma once

#include "options.hpp"
#include "output/progress_line.hpp"
#include "output/table.hpp"
#include "output/terminal.hpp"
#include "train/training.hpp"

#include <cstdint>
#include <optional>

namespace infinitybatch::app {

/// Shows a training to its user: a heading, a row an epoch, a summary; with --json the same as
/// events on stdout, while the text goes to stderr.
class TrainingReport final : public TrainingObserver {
 public:
  TrainingReport(Terminal& terminal, const Settings& settings);

  void begin(const Dataset& data, const Network& network);
  /// The training of a checkpoint goes on.
  void resumed(const std::string& path, const TrainerState& state);
  /// A file was written: `event` is "checkpoint" or "saved".
  void saved(const std::string& event, const std::string& path, int64_t epoch);
  void on_progress(const Progress& progress) override;
  void on_epoch(const EpochResult& result) override;
  void end();

 private:
  /// Measured peak divided by the budget; empty without a budget.
  std::optional<double> share_of_budget(int64_t peak_bytes) const;

  Terminal& terminal_;
  const Settings& settings_;
  std::optional<int64_t> budget_;
  Table table_;
  ProgressLine progress_;
  EpochResult last_;
  double seconds_ = 0;
  int64_t peak_bytes_ = 0;
  int64_t restarts_ = 0;
  int64_t steps_ = 0;
  int64_t offloaded_bytes_ = 0;
  double best_accuracy_ = 0;
  int64_t best_epoch_ = 0;
};

}  // namespace infinitybatch::app
