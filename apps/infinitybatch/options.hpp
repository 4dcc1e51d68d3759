#pragma once

#include "data/dataset.hpp"
#include "models/network.hpp"
#include "train/training.hpp"

#include <infinitybatch/step/bench.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace infinitybatch::app {

enum class Command { train, evaluate, predict, export_model, plan, verify, bench, doctor };

/// Everything that the flags of all commands say; a command reads what it needs.
struct Settings {
  Command command = Command::train;
  DataOptions data;
  ModelOptions model;
  TrainingOptions training;
  BenchOptions bench;
  std::string memory_budget;  ///< as written: "24MiB", "0.8", "auto", or empty
  std::string host_budget;    ///< alike
  std::string offload = "auto";
  bool json = false;

  std::string save;              ///< where train writes the model; empty: nowhere
  int64_t checkpoint_every = 0;  ///< epochs; 0: where training is interrupted alone
  std::string resume;            ///< a checkpoint, or empty
  std::string file;              ///< the model of evaluate, predict and export
  std::string output;            ///< of predict and export
  std::string samples;           ///< of the model's own data: "held-out", "train" or empty
  bool scores = false;           ///< predict scores in place of classes

  // Written as text so that "all" and device names can be checked with messages of our own.
  std::string batch_size = "512";
  std::string device = "cpu";
  std::string config;
};

/// "auto", "always" and "never", in the order of Offload::When.
const std::vector<std::string>& offload_names();

/// What a parse led to: settings, or a text to print (help, version).
struct Parsed {
  std::optional<Settings> settings;
  std::string text;
};

/// Reads flags and the configuration file, flags first.
/// \throws UsageError on one line with a way out, for anything that cannot be used
Parsed parse_command_line(int argc, const char* const* argv);

}  // namespace infinitybatch::app
