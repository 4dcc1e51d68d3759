#include <ATen/Context.h>

#include "commands/commands.hpp"
#include "interrupt.hpp"
#include "output/terminal.hpp"
#include "output/training_report.hpp"
#include "train/network_in_budget.hpp"

namespace infinitybatch::app {

ExitCode run_train(Settings settings) {
  watch_for_interrupts();
  const Dataset data = load_dataset(settings.data, settings.model.context);
  at::manual_seed(settings.training.seed);
  const TrainingOptions& training = settings.training;
  const std::shared_ptr<Network> network =
      make_network_in_budget(settings.model, data, training.device, training.step.memory_budget);

  Terminal terminal(settings.json ? stderr : stdout);
  TrainingReport report(terminal, settings);
  report.begin(data, *network);
  try {
    train(network, data, settings.training, report);
  } catch (...) {
    terminal.clear_passing();
    throw;
  }
  report.end();
  return ExitCode::ok;
}

}  // namespace infinitybatch::app
