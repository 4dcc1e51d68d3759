#include "store/flag_values.hpp"

#include "errors.hpp"

#include <algorithm>
#include <cstdio>

namespace infinitybatch::app {
namespace {

/// What a training cannot change on its way: the model, the order of its samples, its optimizer.
const std::vector<std::string> kFixed = {"model",    "width",      "depth",     "context",
                                         "held-out", "batch-size", "optimizer", "seed"};

bool of_data(const std::string& flag) {
  return flag == "labels" || flag == "inputs" || flag == "csv-header" || flag == "image-size";
}

std::string exactly(double number) {
  char text[40];
  std::snprintf(text, sizeof text, "%.17g", number);
  return text;
}

bool same_value(const std::string& a, const std::string& b) {
  double left = 0;
  double right = 0;
  if (CLI::detail::lexical_cast(a, left) && CLI::detail::lexical_cast(b, right)) {
    return left == right;
  }
  return a == b;
}

}  // namespace

FlagValues flags_of(const Settings& settings) {
  const TrainingOptions& training = settings.training;
  const StepOptions& step = training.step;
  FlagValues flags = {
      {"data", settings.data.data},
      {"model", settings.model.model},
      {"context", std::to_string(settings.model.context)},
      {"batch-size", settings.batch_size},
      {"strategy", step.strategy},
      {"device", settings.device},
      {"offload", settings.offload},
      {"optimizer", training.optimizer.name},
      {"lr", exactly(training.optimizer.lr.value_or(default_lr(training.optimizer.name)))},
      {"schedule", training.schedule},
      {"epochs", std::to_string(training.epochs)},
      {"seed", std::to_string(training.seed)}};
  const auto add = [&](const char* flag, const std::string& value) {
    if (!value.empty()) flags.emplace_back(flag, value);
  };
  // A shared library's network has its own where they are not given.
  if (settings.model.width > 0) add("width", std::to_string(settings.model.width));
  if (settings.model.depth > 0) add("depth", std::to_string(settings.model.depth));
  add("labels", settings.data.labels);
  add("inputs", settings.data.inputs);
  add("csv-header", settings.data.csv_header);
  add("image-size", settings.data.image_size);
  if (settings.data.held_out) add("held-out", exactly(*settings.data.held_out));
  if (step.micro_batch_size) add("micro-batch-size", std::to_string(*step.micro_batch_size));
  if (training.clip) add("clip", exactly(*training.clip));
  if (training.amp) add("amp", "true");
  if (training.ema) add("ema", exactly(*training.ema));
  std::string metrics;
  for (const std::string& name : training.metrics) metrics += (metrics.empty() ? "" : ",") + name;
  add("metrics", metrics);
  add("memory-budget", settings.memory_budget);
  add("host-budget", settings.host_budget);
  add("offload-directory", step.offload.directory);
  add("save", settings.save);
  if (settings.checkpoint_every > 0) {
    add("checkpoint-every", std::to_string(settings.checkpoint_every));
  }
  return flags;
}

void read_checkpoint_flags(CLI::App& command, const std::string& path) {
  const bool has_data = command.get_option("--data")->count() > 0;
  for (const auto& [flag, value] : flags_in(read_safetensors(path))) {
    if (has_data && of_data(flag)) continue;  // of the data of before
    CLI::Option* option = command.get_option_no_throw("--" + flag);
    if (option == nullptr) {
      throw DataError(path + ": was saved with --" + flag +
                      ", which this version does not have; resume with the version that saved it");
    }
    if (option->count() == 0) {
      try {
        option->add_result(value);
        option->run_callback();
      } catch (const CLI::ParseError& error) {
        throw DataError(path + ": its flags are damaged: " + one_line(error.what()));
      }
      continue;
    }
    const std::string given = option->results().front();
    const bool fixed = std::find(kFixed.begin(), kFixed.end(), flag) != kFixed.end();
    if (fixed && !same_value(given, value)) {
      throw UsageError("--" + flag + " is " + given + ", and " + path + " was trained with " +
                       value + "; leave --" + flag + " out, or train anew without --resume");
    }
  }
}

std::string resume_command(const std::string& checkpoint) {
  std::string quoted;
  const bool plain =
      checkpoint.find_first_not_of(
          "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./-+=:,@%") ==
      checkpoint.npos;
  if (plain) {
    quoted = checkpoint;
  } else {
    quoted = "'";
    for (char c : checkpoint) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
    quoted += "'";
  }
  return "infinitybatch train --resume " + quoted;
}

}  // namespace infinitybatch::app
