#include "commands/commands.hpp"
#include "errors.hpp"
#include "interrupt.hpp"
#include "output/terminal.hpp"
#include "output/training_report.hpp"
#include "store/checkpoint.hpp"
#include "store/flag_values.hpp"
#include "store/model_file.hpp"
#include "train/network_in_budget.hpp"

#include <ATen/Context.h>

#include <cstdlib>
#include <optional>
#include <string>

namespace infinitybatch::app {
namespace {

/// \throws UsageError, DataError where nothing is left to do, or it was trained on other data
std::optional<StoredTensors> open_checkpoint(const Settings& settings, const Dataset& data) {
  if (settings.resume.empty()) return std::nullopt;
  StoredTensors stored = read_safetensors(settings.resume);
  const int64_t done = snapshot_in(stored).state.epoch;
  if (done >= settings.training.epochs) {
    throw UsageError("--resume " + settings.resume + ": all " + std::to_string(done) +
                     " epochs are done; train on with more, as in: --epochs " +
                     std::to_string(2 * done));
  }
  if (description_in(stored).fingerprint != fingerprint_of(data)) {
    throw DataError("--data " + settings.data.data + " holds other samples than " +
                    settings.resume +
                    " was trained on; give the same data, or train anew without --resume");
  }
  return stored;
}

Checkpoints checkpoints_of(const Settings& settings, const std::shared_ptr<Network>& network,
                           const Dataset& data, const std::optional<StoredTensors>& resumed,
                           TrainingReport& report) {
  Checkpoints checkpoints;
  if (resumed) {
    checkpoints.restore = [&, network](torch::optim::Optimizer& optimizer) {
      load_checkpoint(*resumed, *network, optimizer);
      return snapshot_in(*resumed);
    };
  }
  if (settings.save.empty()) return checkpoints;
  const std::string path = checkpoint_beside(settings.save);
  checkpoints.every = settings.checkpoint_every;
  checkpoints.how_to_go_on = resume_command(path);
  checkpoints.save = [&, network, path](torch::optim::Optimizer& optimizer,
                                        const Snapshot& snapshot) {
    save_checkpoint(path, *network, optimizer, describe_model(settings.model, settings.data, data),
                    flags_of(settings), snapshot);
    report.saved("checkpoint", path, snapshot.state.epoch);
  };
  return checkpoints;
}

/// Each would train a replica of its own, and all would write the same files.
void refuse_other_ranks() {
  const char* const given = std::getenv("WORLD_SIZE");
  const int64_t ranks = given == nullptr ? 1 : std::strtoll(given, nullptr, 10);
  if (ranks <= 1) return;
  throw UsageError(
      "WORLD_SIZE is " + std::string(given) +
      ", and train works in one process: each of torchrun's would train a model of its "
      "own and write the same files. Run it without torchrun (env -u WORLD_SIZE), or "
      "train in Python: "
      "DDP(ib.wrap(model, process_group=torch.distributed.group.WORLD))");
}

}  // namespace

ExitCode run_train(Settings settings) {
  refuse_other_ranks();
  watch_for_interrupts();
  const Dataset data = load_dataset(settings.data, settings.model.context);
  const auto resumed = open_checkpoint(settings, data);
  at::manual_seed(settings.training.seed);
  const TrainingOptions& training = settings.training;
  const std::shared_ptr<Network> network =
      make_network_in_budget(settings.model, data, training.device, training.step.memory_budget);

  Terminal terminal(settings.json ? stderr : stdout);
  TrainingReport report(terminal, settings);
  if (resumed) report.resumed(settings.resume, snapshot_in(*resumed).state);
  report.begin(data, *network);
  try {
    train(network, data, settings.training, report,
          checkpoints_of(settings, network, data, resumed, report));
  } catch (...) {
    terminal.clear_passing();
    throw;
  }
  report.end();
  if (!settings.save.empty()) {
    save_model(settings.save, *network, describe_model(settings.model, settings.data, data));
    report.saved("saved", settings.save, training.epochs);
  }
  return ExitCode::ok;
}

}  // namespace infinitybatch::app
