#include "options.hpp"

#include <infinitybatch/memory/budget.hpp>

#include <CLI/CLI.hpp>

#include "build_info.hpp"
#include "config_file.hpp"
#include "device.hpp"
#include "errors.hpp"
#include "help.hpp"
#include "suggest.hpp"

namespace infinitybatch::app {
namespace {

constexpr int64_t kMost = int64_t{1} << 40;  // far above anything sensible, far below overflow

// Validators describe themselves in the help beside the type; here the texts do that.
CLI::Validator between(double smallest, double largest) {
  return CLI::Range(smallest, largest).description("");
}
CLI::Validator at_least(int64_t smallest) {
  return CLI::Range(smallest, kMost).description("");
}
CLI::Validator one_of(const std::vector<std::string>& names) {
  return CLI::IsMember(names).description("");
}

void add_data(CLI::App& app, Settings& settings) {
  app.add_option("--data", settings.data.data,
                 "folder of MNIST-format IDX files, .npy, IDX or text file, or a name under data/")
      ->type_name("PATH")
      ->capture_default_str()
      ->group("Data");
  app.add_option("--labels", settings.data.labels,
                 "classes of the samples, where --data is a .npy or IDX file")
      ->type_name("FILE")
      ->group("Data");
  app.add_option("--held-out", settings.data.held_out,
                 "share of the samples kept for measuring [0.2, or the files' own split]")
      ->check(between(0.0, 0.9))
      ->type_name("SHARE")
      ->group("Data");
}

void add_model(CLI::App& app, Settings& settings) {
  app.add_option("--model", settings.model.model,
                 "mlp, convnet, resnet or transformer [what suits the data]")
      ->check(one_of(model_names()))
      ->type_name("NAME")
      ->group("Model");
  app.add_option("--width", settings.model.width, "units, channels or embedding size")
      ->check(at_least(1))
      ->type_name("NUMBER")
      ->group("Model");
  app.add_option("--depth", settings.model.depth,
                 "hidden layers, convolutions, blocks a stage, or transformer layers")
      ->check(at_least(1))
      ->type_name("NUMBER")
      ->group("Model");
  app.add_option("--context", settings.model.context, "bytes of text that a transformer sees")
      ->check(at_least(1))
      ->type_name("NUMBER")
      ->capture_default_str()
      ->group("Model");
}

void add_batch(CLI::App& app, Settings& settings) {
  app.add_option("--batch-size", settings.batch_size,
                 "samples per optimizer step; \"all\" is the whole data set")
      ->type_name("NUMBER|all")
      ->capture_default_str()
      ->group("Batch and memory");
  app.add_option("--memory-budget", settings.memory_budget,
                 "what tensors may occupy: 24MiB, 0.8 (of the device) or auto [auto; native: none]")
      ->type_name("BYTES")
      ->group("Batch and memory");
  app.add_option("--device", settings.device, "cpu, or an accelerator as torch names it")
      ->type_name("NAME")
      ->capture_default_str()
      ->group("Batch and memory");
}

void add_common(CLI::App& app, Settings& settings) {
  app.add_option("--seed", settings.training.seed, "for parameters and the order of samples")
      ->type_name("NUMBER")
      ->capture_default_str();
  app.add_option("--config", settings.config, "read flags from a TOML file; flags given here win")
      ->type_name("FILE")
      ->configurable(false);
}

void add_optimizer(CLI::App& app, Settings& settings) {
  app.add_option("--optimizer", settings.training.optimizer.name,
                 "sgd (momentum 0.9), adam, adamw, rmsprop or adagrad")
      ->type_name("NAME")
      ->capture_default_str()
      ->group("Training");
}

void add_json(CLI::App& app, Settings& settings) {
  app.add_flag("--json", settings.json, "JSON lines on stdout, everything else on stderr");
}

void add_training(CLI::App& app, Settings& settings) {
  auto& training = settings.training;
  app.add_option("--epochs", training.epochs, "how often each sample is seen")
      ->check(at_least(1))
      ->type_name("NUMBER")
      ->capture_default_str()
      ->group("Training");
  app.add_option("--lr", training.optimizer.lr, "learning rate [the optimizer's usual one]")
      ->check(between(0.0, 1e6))
      ->type_name("NUMBER")
      ->group("Training");
  app.add_option("--micro-batch-size", training.step.micro_batch_size,
                 "samples at once [the fastest that fits]")
      ->check(at_least(1))
      ->type_name("NUMBER")
      ->group("Batch and memory");
  app.add_option("--strategy", training.step.strategy,
                 "auto, stream (micro-batches) or native (the whole batch at once)")
      ->check(one_of({"auto", "stream", "native"}))
      ->type_name("NAME")
      ->capture_default_str()
      ->group("Batch and memory");
}

/// Turns text into values and refuses what contradicts itself.
void finish(Settings& settings) {
  auto& step = settings.training.step;
  settings.training.device = parse_device(settings.device);
  if (settings.batch_size == "all") {
    step.batch_size.reset();
  } else {
    int64_t size = 0;
    if (!CLI::detail::lexical_cast(settings.batch_size, size) || size < 1 || size > kMost) {
      throw UsageError("--batch-size " + settings.batch_size +
                       " is neither a number of 1 or more nor \"all\"");
    }
    step.batch_size = size;
  }
  if (!settings.memory_budget.empty()) {
    try {
      const memory::Budget budget(settings.memory_budget);
      step.memory_budget = budget.resolve(settings.training.device);
    } catch (const InvalidArgument& error) {
      throw UsageError(std::string("--memory-budget: ") + error.what_without_backtrace());
    }
  }
  if (step.strategy == "native" && step.micro_batch_size) {
    throw UsageError(
        "--micro-batch-size means nothing with --strategy native, which computes the "
        "whole batch at once; leave one of them out");
  }
  default_lr(
      settings.training.optimizer.name);  // an unknown optimizer is told before data are read
}

/// The long names of all flags and commands of `app`.
std::vector<std::string> names_of(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    names.push_back("--" + option->get_single_name());
  }
  for (const CLI::App* command : app.get_subcommands({})) {
    names.push_back(command->get_name());
  }
  return names;
}

/// A parse error on one line: what is wrong, what may have been meant, where to read on.
std::string describe(const CLI::App& app, const CLI::ParseError& error,
                     const std::string& command) {
  const std::string where =
      "; see: infinitybatch " + command + (command.empty() ? "" : " ") + "--help";
  const CLI::App* scope = command.empty() ? &app : app.get_subcommand(command);
  std::vector<std::string> extras = scope->remaining();
  if (extras.empty()) {
    extras = app.remaining();
  }
  // A mistyped command leaves CLI11 without a command, which it tells first.
  const bool is_extra = dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr;
  if (!extras.empty() && (command.empty() || is_extra)) {
    return extras.front() + " is not known" + suggestion(extras.front(), names_of(*scope)) + where;
  }
  if (app.get_subcommands().empty()) {
    return "a command is needed: train, plan or doctor" + where;
  }
  return one_line(error.what()) + where;
}

}  // namespace

Parsed parse_command_line(int argc, const char* const* argv) {
  Settings settings;
  CLI::App app(help::kProgram, "infinitybatch");
  app.footer(help::kProgramFooter);
  app.set_version_flag("--version", version_text());
  app.require_subcommand(1);

  CLI::App& train = *app.add_subcommand("train", help::kTrain);
  CLI::App& plan = *app.add_subcommand("plan", help::kPlan);
  CLI::App& doctor = *app.add_subcommand("doctor", help::kDoctor);
  train.footer(help::kTrainFooter);
  plan.footer(help::kPlanFooter);
  doctor.footer(help::kDoctorFooter);
  for (CLI::App* command : {&train, &plan}) {
    add_data(*command, settings);
    add_model(*command, settings);
    add_batch(*command, settings);
    add_optimizer(*command, settings);
  }
  add_training(train, settings);
  for (CLI::App* command : {&train, &plan, &doctor}) {
    if (command != &doctor) {
      add_common(*command, settings);
    }
    add_json(*command, settings);
  }

  std::string command;
  try {
    app.parse(argc, argv);
    CLI::App& chosen = *app.get_subcommands().front();
    command = chosen.get_name();
    if (!settings.config.empty()) {
      read_config_file(chosen, settings.config);
    }
  } catch (const CLI::CallForHelp&) {
    const auto chosen = app.get_subcommands();
    return {std::nullopt, chosen.empty() ? app.help() : chosen.front()->help("infinitybatch")};
  } catch (const CLI::CallForVersion& version) {
    return {std::nullopt, std::string(version.what()) + "\n"};
  } catch (const CLI::ParseError& error) {
    const auto chosen = app.get_subcommands();
    throw UsageError(describe(app, error, chosen.empty() ? "" : chosen.front()->get_name()));
  }
  settings.command = command == "train"  ? Command::train
                     : command == "plan" ? Command::plan
                                         : Command::doctor;
  if (settings.command != Command::doctor) {
    finish(settings);
  }
  return {settings, {}};
}

}  // namespace infinitybatch::app
