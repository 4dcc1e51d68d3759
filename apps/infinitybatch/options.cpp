#include "options.hpp"

#include "build_info.hpp"
#include "config_file.hpp"
#include "device.hpp"
#include "errors.hpp"
#include "flags.hpp"
#include "help.hpp"
#include "parse_errors.hpp"
#include "store/atomic_file.hpp"
#include "store/flag_values.hpp"
#include "suggest.hpp"

#include <infinitybatch/memory/budget.hpp>

#include <unistd.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <filesystem>

namespace infinitybatch::app {
namespace {

/// One command of the program.
struct Entry {
  Command command;
  const char* name;
  const char* help;
  const char* footer;
  void (*add_flags)(CLI::App&, Settings&);
};

constexpr Entry kCommands[] = {
    {Command::train, "train", help::kTrain, help::kTrainFooter, add_train_flags},
    {Command::evaluate, "evaluate", help::kEvaluate, help::kEvaluateFooter, add_evaluate_flags},
    {Command::predict, "predict", help::kPredict, help::kPredictFooter, add_predict_flags},
    {Command::export_model, "export", help::kExport, help::kExportFooter, add_export_flags},
    {Command::plan, "plan", help::kPlan, help::kPlanFooter, add_plan_flags},
    {Command::verify, "verify", help::kVerify, help::kVerifyFooter, add_verify_flags},
    {Command::bench, "bench", help::kBench, help::kBenchFooter, add_bench_flags},
    {Command::doctor, "doctor", help::kDoctor, help::kDoctorFooter, add_doctor_flags},
};

constexpr int64_t kMostSamples = int64_t{1} << 40;

/// \param flag for the message
int64_t parse_budget(const char* flag, const std::string& text, c10::Device device) {
  try {
    return memory::Budget(text, flag).resolve(device);
  } catch (const InvalidArgument& error) {
    throw UsageError(error.what_without_backtrace());
  }
}

void finish_offload(Settings& settings) {
  Offload& offload = settings.training.step.offload;
  const auto& names = offload_names();
  const auto found = std::find(names.begin(), names.end(), settings.offload);
  offload.when = static_cast<Offload::When>(found - names.begin());
  const char* given = !settings.host_budget.empty() ? "--host-budget"
                      : !offload.directory.empty()  ? "--offload-directory"
                                                    : nullptr;
  if (settings.training.step.strategy == "native" &&
      (given != nullptr || offload.when == Offload::When::always)) {
    throw UsageError(std::string(given != nullptr ? given : "--offload always") +
                     " means nothing with --strategy native, where nothing waits for the rest of "
                     "the batch; leave one of them out");
  }
  if (offload.when == Offload::When::never && given != nullptr) {
    throw UsageError(std::string(given) +
                     " means nothing with --offload never; leave one of them out");
  }
  if (!settings.host_budget.empty()) {
    offload.host_budget = parse_budget("--host-budget", settings.host_budget, c10::kCPU);
  }
  if (!offload.directory.empty()) {
    std::error_code ignored;
    const bool is_folder = std::filesystem::is_directory(offload.directory, ignored);
    if (!is_folder || ::access(offload.directory.c_str(), W_OK | X_OK) != 0) {
      throw UsageError("--offload-directory " + offload.directory +
                       (is_folder ? " cannot be written to" : " is no folder") +
                       "; name one on a disk with room, or leave it out");
    }
  }
}

/// \param endings that `path` may have
void check_ending(const std::string& flag, const std::string& path,
                  const std::vector<std::string>& endings) {
  const std::filesystem::path file(path);
  if (std::find(endings.begin(), endings.end(), file.extension()) == endings.end()) {
    throw UsageError(flag + " " + path + " does not end in " + endings.front() +
                     (endings.size() > 1 ? " or " + endings.back() : "") + ", as in: " + flag +
                     " " + std::filesystem::path(file).replace_extension(endings.front()).string());
  }
  check_can_be_written(flag, path);
}

void finish_files(const Settings& settings) {
  if (!settings.save.empty()) check_ending("--save", settings.save, {".safetensors"});
  if (settings.checkpoint_every > 0 && settings.save.empty()) {
    throw UsageError(
        "--checkpoint-every needs a place; name the model's file, as in: --save "
        "model.safetensors");
  }
  if (settings.command == Command::predict) check_ending("--output", settings.output, {".npy"});
  if (settings.command == Command::export_model) {
    check_ending("--output", settings.output, {".pt", ".safetensors"});
    check_is_not_read("--output", settings.output, "export", settings.file);
  }
}

void check_metrics(const std::vector<std::string>& names) {
  for (size_t i = 0; i < names.size(); ++i) {
    if (std::find(names.begin(), names.begin() + static_cast<ptrdiff_t>(i), names[i]) !=
        names.begin() + static_cast<ptrdiff_t>(i)) {
      throw UsageError("--metrics names " + names[i] + " twice; name it once");
    }
  }
}

/// Turns text into values and refuses what contradicts itself.
void finish(Settings& settings) {
  auto& step = settings.training.step;
  settings.training.device = parse_device(CLI::detail::to_lower(settings.device));
  if (settings.batch_size == "all") {
    step.batch_size.reset();
  } else {
    int64_t size = 0;
    const std::string& text = settings.batch_size;
    const bool is_number = CLI::detail::lexical_cast(text, size);
    const bool is_large = text.find_first_not_of("0123456789") == std::string::npos &&
                          (is_number ? size > kMostSamples : !text.empty());
    if (is_large) {
      throw UsageError("--batch-size " + text + " is more than " + std::to_string(kMostSamples) +
                       "; the whole data set is: --batch-size all");
    }
    if (!is_number || size < 1) {
      throw UsageError("--batch-size " + text + " is neither a number of 1 or more nor \"all\"");
    }
    step.batch_size = size;
  }
  if (!settings.memory_budget.empty()) {
    step.memory_budget =
        parse_budget("--memory-budget", settings.memory_budget, settings.training.device);
  }
  finish_offload(settings);
  finish_files(settings);
  check_metrics(settings.training.metrics);
  if (step.strategy == "native" && step.micro_batch_size) {
    throw UsageError(
        "--micro-batch-size means nothing with --strategy native, which computes the "
        "whole batch at once; leave one of them out");
  }
  auto& optimizer = settings.training.optimizer.name;
  optimizer = CLI::detail::to_lower(optimizer);
  // An unknown optimizer is told before any data are read.
  default_lr(settings.training.optimizer.name);
}

}  // namespace

const std::vector<std::string>& offload_names() {
  static const std::vector<std::string> names = {"auto", "always", "never"};
  return names;
}

Parsed parse_command_line(int argc, const char* const* argv) {
  Settings settings;
  CLI::App app(help::kProgram, "infinitybatch");
  app.footer(help::kProgramFooter);
  app.set_version_flag("--version", version_text());
  app.require_subcommand(1);

  for (const Entry& entry : kCommands) {
    CLI::App& command = *app.add_subcommand(entry.name, entry.help);
    command.footer(entry.footer);
    entry.add_flags(command, settings);
  }

  std::string command;
  try {
    app.parse(argc, argv);
    CLI::App& chosen = *app.get_subcommands().front();
    command = chosen.get_name();
    if (!settings.config.empty()) {
      read_config_file(chosen, settings.config);
    }
    if (!settings.resume.empty()) read_checkpoint_flags(chosen, settings.resume);
    const bool takes_model = command == "evaluate" || command == "predict";
    // The model knows its own data.
    if (takes_model && chosen.get_option("--data")->count() == 0) settings.data.data.clear();
  } catch (const CLI::CallForHelp&) {
    const auto chosen = app.get_subcommands();
    return {std::nullopt, chosen.empty() ? app.help() : chosen.front()->help("infinitybatch")};
  } catch (const CLI::CallForVersion& version) {
    return {std::nullopt, std::string(version.what()) + "\n"};
  } catch (const CLI::ParseError& error) {
    const auto chosen = app.get_subcommands();
    throw UsageError(describe(app, error, chosen.empty() ? "" : chosen.front()->get_name(),
                              {argv + 1, argv + argc}));
  }
  for (const Entry& entry : kCommands) {
    if (command == entry.name) settings.command = entry.command;
  }
  if (settings.command != Command::doctor) {
    finish(settings);
  }
  return {settings, {}};
}

}  // namespace infinitybatch::app
