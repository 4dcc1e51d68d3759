#include "flags.hpp"

#include <charconv>
#include <cmath>
#include <string>
#include <vector>

namespace infinitybatch::app {
namespace {

constexpr int64_t kMost = int64_t{1} << 40;  // far above anything sensible, far below overflow

// Validators describe themselves in the help beside the type; here the texts do that.
CLI::Validator between(double smallest, double largest) {
  const CLI::Validator range = CLI::Range(smallest, largest).description("");
  // Nothing is smaller than "nan", nor larger.
  return CLI::Validator(
      [range](std::string& text) {
        double number = 0;
        const bool is_nan = CLI::detail::lexical_cast(text, number) && std::isnan(number);
        return is_nan ? text + " is no number" : range(text);
      },
      "");
}
/// Signs are dropped, and what is too large becomes the largest number, where CLI11 reads one
/// without a sign.
CLI::Validator seed() {
  return CLI::Validator(
      [](std::string& text) {
        uint64_t number = 0;
        const char* const end = text.data() + text.size();
        const auto [read, error] = std::from_chars(text.data(), end, number);
        if (error == std::errc() && read == end) return std::string();
        return text.find('-') != text.npos
                   ? "Value " + text + " is negative; a seed is 0 or more"
                   : "Value " + text + " is not a whole number from 0 to 18446744073709551615";
      },
      "");
}
/// An empty shell variable is a mistake, and no wish for the default.
CLI::Validator not_empty(const std::string& examples) {
  return CLI::Validator(
      [examples](std::string& text) {
        return text.empty() ? "is empty; write " + examples + ", or leave it out" : std::string();
      },
      "");
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
      ->check(not_empty("a path"))
      ->type_name("PATH")
      ->capture_default_str()
      ->group("Data");
  app.add_option("--labels", settings.data.labels,
                 "classes of the samples, where --data is a .npy or IDX file")
      ->check(not_empty("a path"))
      ->type_name("FILE")
      ->group("Data");
  app.add_option("--held-out", settings.data.held_out,
                 "share of the samples kept for measuring [0.2, or the files' own split]")
      ->check(between(0.0, 0.9))
      ->type_name("SHARE")
      ->group("Data");
}

void add_model(CLI::App& app, Settings& settings) {
  app.add_option(
         "--model", settings.model.model,
         "mlp, convnet, resnet (BatchNorm), resnet-groupnorm or transformer [what suits the "
         "data]")
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
      ->check(not_empty("24MiB, 0.8 or auto"))
      ->type_name("BYTES")
      ->group("Batch and memory");
  app.add_option("--device", settings.device, "cpu, or an accelerator as torch names it")
      ->type_name("NAME")
      ->capture_default_str()
      ->group("Batch and memory");
}

void add_common(CLI::App& app, Settings& settings) {
  app.add_option("--seed", settings.training.seed, "for parameters and the order of samples")
      ->check(seed())
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

void add_micro_batch(CLI::App& app, Settings& settings) {
  app.add_option("--micro-batch-size", settings.training.step.micro_batch_size,
                 "samples at once [the fastest that fits]")
      ->check(at_least(1))
      ->type_name("NUMBER")
      ->group("Batch and memory");
}

/// Where what waits for the rest of the batch goes (BatchNorm, samples that do not fit).
void add_offload(CLI::App& app, Settings& settings) {
  app.add_option("--offload", settings.offload,
                 "move what waits for the rest of the batch off the device: auto (where nothing "
                 "fits otherwise), always or never")
      ->check(one_of(offload_names()))
      ->type_name("WHEN")
      ->capture_default_str()
      ->group("Offload");
  app.add_option("--host-budget", settings.host_budget,
                 "host memory for it, beside the memory budget; the rest goes to disk [half of "
                 "what is free; on the CPU none]")
      ->check(not_empty("24MiB, 0.8 or auto"))
      ->type_name("BYTES")
      ->group("Offload");
  app.add_option("--offload-directory", settings.training.step.offload.directory,
                 "folder of the file on disk, which has no name and is gone with the process "
                 "[$TMPDIR, or /var/tmp]")
      ->check(not_empty("a folder"))
      ->type_name("PATH")
      ->group("Offload");
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
  add_micro_batch(app, settings);
  app.add_option("--strategy", training.step.strategy,
                 "auto, stream (micro-batches) or native (the whole batch at once)")
      ->check(one_of({"auto", "stream", "native"}))
      ->type_name("NAME")
      ->capture_default_str()
      ->group("Batch and memory");
}

void add_bench(CLI::App& app, Settings& settings) {
  app.add_option("--rounds", settings.bench.rounds, "how often each strategy is timed, at most")
      ->check(at_least(1))
      ->type_name("NUMBER")
      ->capture_default_str()
      ->group("Measuring");
  app.add_option("--seconds", settings.bench.seconds,
                 "no further round begins after as many, once three are done")
      ->check(between(1e-3, 1e9))
      ->type_name("NUMBER")
      ->capture_default_str()
      ->group("Measuring");
}

/// What every command takes that computes batches.
void add_shared(CLI::App& app, Settings& settings) {
  add_data(app, settings);
  add_model(app, settings);
  add_batch(app, settings);
  add_offload(app, settings);
  add_common(app, settings);
  add_json(app, settings);
}

}  // namespace

void add_train_flags(CLI::App& command, Settings& settings) {
  add_shared(command, settings);
  add_optimizer(command, settings);
  add_training(command, settings);
}

void add_plan_flags(CLI::App& command, Settings& settings) {
  add_shared(command, settings);
  add_optimizer(command, settings);
}

void add_verify_flags(CLI::App& command, Settings& settings) {
  add_shared(command, settings);
  add_micro_batch(command, settings);
}

void add_bench_flags(CLI::App& command, Settings& settings) {
  add_shared(command, settings);
  add_micro_batch(command, settings);
  add_bench(command, settings);
}

void add_doctor_flags(CLI::App& command, Settings& settings) {
  add_json(command, settings);
}

}  // namespace infinitybatch::app
