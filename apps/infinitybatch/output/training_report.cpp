#include "output/training_report.hpp"

#include "build_info.hpp"
#include "output/describe.hpp"
#include "output/json_lines.hpp"
#include "output/numbers.hpp"

#include <infinitybatch/core/bytes.hpp>

#include <ATen/Parallel.h>

#include <algorithm>

namespace infinitybatch::app {
namespace {

using Json = nlohmann::ordered_json;

std::vector<Column> columns(bool has_budget, bool utf8, const std::vector<std::string>& metrics) {
  std::vector<Column> all = {{"epoch"}, {"loss", 8}, {"held-out accuracy"}};
  for (const std::string& name : metrics) all.push_back({name, 8});
  all.insert(all.end(), {{"samples/s", 9}, {"micro-batch"}, {"peak", 9}});
  if (has_budget) {
    all.push_back({peak_heading(utf8)});
  }
  return all;
}

std::string percent(double share) {
  return fixed(100 * share, 1) + " %";
}

Json or_null(const std::optional<double>& value) {
  return value ? Json(*value) : Json(nullptr);
}

}  // namespace

TrainingReport::TrainingReport(Terminal& terminal, const Settings& settings)
    : terminal_(terminal),
      settings_(settings),
      budget_(settings.training.step.memory_budget),
      table_(columns(budget_.has_value(), terminal.is_utf8(), settings.training.metrics)),
      progress_(terminal, settings.training.epochs) {}

std::optional<double> TrainingReport::share_of_budget(int64_t peak_bytes) const {
  if (!budget_) {
    return std::nullopt;
  }
  return static_cast<double>(peak_bytes) / static_cast<double>(*budget_);
}

void TrainingReport::begin(const Dataset& data, const Network& network) {
  for (const std::string& line : describe_job(data, settings_, network)) {
    terminal_.line(line);
  }
  const auto& training = settings_.training;
  const double lr = training.optimizer.lr.value_or(default_lr(training.optimizer.name));
  terminal_.line(training.optimizer.name + ", lr " + shortest(lr) + ", " +
                 std::to_string(training.epochs) + " epochs, seed " +
                 std::to_string(training.seed));
  terminal_.line("");
  terminal_.line(table_.heading());
  terminal_.line(table_.rule(terminal_.is_utf8()));
  if (settings_.json) {
    Json fields = job_as_json(data, settings_, network);
    fields.update({{"strategy", training.step.strategy},
                   {"optimizer", training.optimizer.name},
                   {"lr", lr},
                   {"epochs", training.epochs},
                   {"seed", training.seed},
                   {"threads", at::get_num_threads()},
                   {"version", version()},
                   {"torch", torch_loaded()}});
    write_json("start", fields);
  }
}

void TrainingReport::resumed(const std::string& path, const TrainerState& state) {
  std::string line = "resumed from " + path + " after epoch " + std::to_string(state.epoch);
  if (state.in_epoch) line += " and " + std::to_string(state.batch) + " steps";
  terminal_.line(line);
  if (settings_.json) {
    write_json("resumed", {{"path", path}, {"epoch", state.epoch}, {"step", state.step}});
  }
}

void TrainingReport::saved(const std::string& event, const std::string& path, int64_t epoch) {
  // A table with a line in each row's place is hard to read: people are told of the model alone.
  if (event == "saved") terminal_.line("saved " + path);
  if (settings_.json) write_json(event, {{"path", path}, {"epoch", epoch}});
}

void TrainingReport::on_progress(const Progress& progress) {
  progress_.update(progress);
}

void TrainingReport::on_epoch(const EpochResult& result) {
  last_ = result;
  seconds_ += result.seconds;
  peak_bytes_ = std::max(peak_bytes_, result.peak_bytes);
  restarts_ += result.restarts;
  steps_ += result.steps;
  offloaded_bytes_ += result.offloaded_bytes;
  if (result.held_out && (best_epoch_ == 0 || result.held_out->accuracy > best_accuracy_)) {
    best_accuracy_ = result.held_out->accuracy;
    best_epoch_ = result.epoch;
  }
  const auto share = share_of_budget(result.peak_bytes);
  std::vector<std::string> cells = {std::to_string(result.epoch), fixed(result.loss, 4),
                                    result.held_out ? percent(result.held_out->accuracy) : "-"};
  for (size_t i = 0; i < settings_.training.metrics.size(); ++i) {
    cells.push_back(i < result.metrics.size() ? fixed(result.metrics[i].second, 4) : "-");
  }
  cells.push_back(with_commas(static_cast<int64_t>(result.samples_per_second)));
  cells.push_back(with_commas(result.micro_batch_size));
  cells.push_back(format_bytes(result.peak_bytes));
  if (share) {
    cells.push_back(fixed(*share, 3));
  }
  terminal_.line(table_.row(cells));
  if (settings_.json) {
    const auto& scores = result.held_out;
    Json fields = {
        {"epoch", result.epoch},
        {"loss", result.loss},
        {"held_out_loss", or_null(scores ? std::optional(scores->loss) : std::nullopt)},
        {"held_out_accuracy", or_null(scores ? std::optional(scores->accuracy) : std::nullopt)},
        {"seconds", result.seconds},
        {"samples_per_second", result.samples_per_second},
        {"micro_batch_size", result.micro_batch_size},
        {"restarts", result.restarts},
        {"steps", result.steps},
        {"offloaded_bytes", result.offloaded_bytes},
        {"strategy_reason", result.strategy_reason},
        {"peak_bytes", result.peak_bytes},
        {"peak_over_budget", or_null(share)}};
    for (const auto& [name, value] : result.metrics) fields["held_out_metrics"][name] = value;
    write_json("epoch", fields);
  }
}

void TrainingReport::end() {
  const auto share = share_of_budget(peak_bytes_);
  terminal_.line("");
  std::string line = "done in " + duration(seconds_) + ": loss " + fixed(last_.loss, 4);
  if (last_.held_out) {
    line += ", held-out accuracy " + percent(last_.held_out->accuracy) + " (best " +
            percent(best_accuracy_) + " in epoch " + std::to_string(best_epoch_) + ")";
  }
  terminal_.line(line);
  line = "peak " + format_bytes(peak_bytes_);
  if (share) {
    line += " = " + fixed(*share, 3) + " of the " + format_bytes(*budget_) + " budget";
  }
  terminal_.line(line + ", micro-batches of " + with_commas(last_.micro_batch_size) + ", " +
                 std::to_string(restarts_) + (restarts_ == 1 ? " restart" : " restarts"));
  if (offloaded_bytes_ > 0) {
    terminal_.line("offloaded and restored, " + format_bytes(offloaded_bytes_ / steps_) +
                   " a step, " + offload_place(settings_.training.step, settings_.training.device));
  }
  if (!last_.strategy_reason.empty()) {
    terminal_.line((last_.strategy == "rerun" ? "forwards ran twice: " : "") +
                   last_.strategy_reason);
  }
  if (settings_.json) {
    Json fields = {{"epochs", last_.epoch},
                   {"loss", last_.loss},
                   {"held_out_accuracy", last_.held_out ? Json(last_.held_out->accuracy) : Json()},
                   {"best_held_out_accuracy", best_epoch_ > 0 ? Json(best_accuracy_) : Json()},
                   {"best_epoch", best_epoch_ > 0 ? Json(best_epoch_) : Json()},
                   {"seconds", seconds_},
                   {"peak_bytes", peak_bytes_},
                   {"memory_budget", budget_ ? Json(*budget_) : Json()},
                   {"peak_over_budget", or_null(share)},
                   {"restarts", restarts_},
                   {"steps", steps_},
                   {"offloaded_bytes", offloaded_bytes_},
                   {"strategy_reason", last_.strategy_reason}};
    write_json("summary", fields);
  }
}

}  // namespace infinitybatch::app
