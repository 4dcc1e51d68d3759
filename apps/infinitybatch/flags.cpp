#include "flags.hpp"

#include "models/shared_library.hpp"
#include "train/metrics.hpp"
#include "train/schedule.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <string>
#include <vector>

namespace infinitybatch::app {
namespace {

constexpr int64_t kMost = int64_t{1} << 40;  // far above anything sensible, far below overflow

// Validators describe themselves in the help beside the type; here the texts do that. What they
// answer goes on after the flag's name: "--lr must be a number, not fast".

std::string shortly(double number) {
  std::array<char, 32> digits{};
  const auto format =
      number == std::floor(number) ? std::chars_format::fixed : std::chars_format::general;
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), number, format).ptr;
  return std::string(digits.data(), end);
}

CLI::Validator between(double smallest, double largest) {
  return CLI::Validator(
      [=](std::string& text) {
        double number = 0;
        const char* const end = text.data() + text.size();
        const auto [read, error] = std::from_chars(text.data(), end, number);
        if (error != std::errc() || read != end || std::isnan(number)) {
          return "must be a number, not " + text;
        }
        if (number >= smallest && number <= largest) return std::string();
        return "must be a number from " + shortly(smallest) + " to " + shortly(largest) + ", not " +
               text;
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
        return "must be a whole number from 0 to 18446744073709551615, not " + text;
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
  return CLI::Validator(
      [smallest](std::string& text) {
        int64_t number = 0;
        const char* const end = text.data() + text.size();
        const auto [read, error] = std::from_chars(text.data(), end, number);
        if (error == std::errc() && read == end && number >= smallest && number <= kMost) {
          return std::string();
        }
        const bool is_large = error == std::errc::result_out_of_range || number > kMost;
        return "must be a whole number, at " +
               (is_large ? "most " + std::to_string(kMost) : "least " + std::to_string(smallest)) +
               ", not " + text;
      },
      "");
}

/// Any case is read. It writes the name as it is known, so it goes with `transform`.
CLI::Validator one_of(const std::vector<std::string>& names) {
  return CLI::Validator(
      [names](std::string& text) {
        const std::string wanted = CLI::detail::to_lower(text);
        if (std::find(names.begin(), names.end(), wanted) != names.end()) {
          text = wanted;
          return std::string();
        }
        std::string list;
        for (size_t i = 0; i < names.size(); ++i) {
          list += (i == 0 ? "" : i + 1 == names.size() ? " or " : ", ") + names[i];
        }
        return "must be " + list + ", not " + text;
      },
      "");
}

/// A name, or a shared library; what looks like a Python factory is told where it goes.
CLI::Validator model_name() {
  return CLI::Validator(
      [](std::string& text) {
        if (is_shared_library(text)) return std::string();
        if (text.find(':') != std::string::npos) {
          return "must be a name or a shared library here, not " + text +
                 "; a factory in Python: python -m infinitybatch train --model " + text;
        }
        return one_of(model_names())(text);
      },
      "");
}

/// How files are read.
void add_reading(CLI::App& app, Settings& settings) {
  app.add_option("--inputs", settings.data.inputs, "array of a .npz that holds samples [inputs, x]")
      ->check(not_empty("the array's name"))
      ->type_name("NAME")
      ->group("Data");
  app.add_option("--csv-header", settings.data.csv_header,
                 "whether line 1 of a .csv holds names: auto, yes or no")
      ->transform(one_of({"auto", "yes", "no"}))
      ->type_name("WHEN")
      ->capture_default_str()
      ->group("Data");
  app.add_option("--image-size", settings.data.image_size,
                 "scale images to 32 or 32x48 (height, width) [they agree]")
      ->check(not_empty("32 or 32x48"))
      ->type_name("PIXELS")
      ->group("Data");
}

void add_data(CLI::App& app, Settings& settings) {
  app.add_option(
         "--data", settings.data.data,
         "folder of MNIST-format IDX files or with a folder of images for each class; .csv, "
         ".npz, .npy, IDX or text file; or a name under data/")
      ->check(not_empty("a path"))
      ->type_name("PATH")
      ->capture_default_str()
      ->group("Data");
  app.add_option(
         "--labels", settings.data.labels,
         "classes: a file, where --data is a .npy or IDX file; a column of a .csv by name or "
         "position (-1 is the last) [label, class, target or y]; an array of a .npz [labels, y]")
      ->check(not_empty("a path"))
      ->type_name("FILE|NAME")
      ->group("Data");
  add_reading(app, settings);
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
         "data]; or a shared library with a network of your own; one in Python: python -m "
         "infinitybatch train --model package.module:factory")
      ->transform(model_name())
      ->type_name("NAME|FILE.so")
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
      ->transform(one_of(offload_names()))
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

void add_metrics(CLI::App& app, Settings& settings) {
  app.add_option("--metrics", settings.training.metrics,
                 "of held-out samples, beside accuracy: top5, balanced-accuracy, macro-f1, "
                 "perplexity, with commas")
      ->delimiter(',')
      ->transform(one_of(metric_names()))
      ->type_name("NAMES")
      ->group("Training");
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
  app.add_option("--schedule", training.schedule,
                 "of the learning rate, epoch by epoch: constant, linear or cosine (to 0)")
      ->check(one_of(schedule_names()))
      ->type_name("NAME")
      ->capture_default_str()
      ->group("Training");
  app.add_option("--clip", training.clip,
                 "scale gradients down where their norm, of all together, is larger")
      ->check(between(1e-12, 1e12))
      ->type_name("NORM")
      ->group("Training");
  app.add_flag("--amp", training.amp, "compute in bfloat16 where torch's autocast does")
      ->group("Training");
  app.add_option("--ema", training.ema,
                 "measure and save averages of the parameters over the steps, as 0.999")
      ->check(between(0.0, 0.9999999))
      ->type_name("DECAY")
      ->group("Training");
  add_metrics(app, settings);
  add_micro_batch(app, settings);
  app.add_option("--strategy", training.step.strategy,
                 "auto, stream (micro-batches) or native (the whole batch at once)")
      ->transform(one_of({"auto", "stream", "native"}))
      ->type_name("NAME")
      ->capture_default_str()
      ->group("Batch and memory");
}

void add_saving(CLI::App& app, Settings& settings) {
  app.add_option("--save", settings.save,
                 "write the trained model there, as model.safetensors; interrupted training "
                 "leaves model.checkpoint.safetensors beside it")
      ->check(not_empty("a path"))
      ->type_name("FILE")
      ->group("Saving");
  app.add_option("--checkpoint-every", settings.checkpoint_every,
                 "write that checkpoint after as many epochs too")
      ->check(at_least(1))
      ->type_name("NUMBER")
      ->group("Saving");
  app.add_option("--resume", settings.resume,
                 "go on from a checkpoint, with its flags; --epochs and what sets memory may be "
                 "given anew")
      ->check(not_empty("a path"))
      ->type_name("FILE")
      ->configurable(false)
      ->group("Saving");
}

/// What evaluate and predict take.
void add_saved_model(CLI::App& app, Settings& settings) {
  app.add_option("--data", settings.data.data,
                 "other samples than the model's own, all of which are used, read as those were")
      ->check(not_empty("a path"))
      ->type_name("PATH")
      ->group("Data");
  app.add_option("--labels", settings.data.labels, "classes of the samples, as in train")
      ->check(not_empty("a path"))
      ->type_name("FILE")
      ->group("Data");
  add_reading(app, settings);
  for (const char* flag : {"--inputs", "--csv-header", "--image-size"}) {
    app.get_option(flag)->needs("--data");
  }
  app.add_option("--samples", settings.samples,
                 "of the data it was trained on: held-out or train [held-out]")
      ->check(one_of({"held-out", "train"}))
      ->type_name("WHICH")
      ->group("Data");
  app.add_option("--memory-budget", settings.memory_budget,
                 "what tensors may occupy: 24MiB, 0.8 (of the device) or auto [no limit]")
      ->check(not_empty("24MiB, 0.8 or auto"))
      ->type_name("BYTES")
      ->group("Batch and memory");
  app.add_option("--micro-batch-size", settings.training.step.micro_batch_size,
                 "samples at once, halved where they do not fit [256]")
      ->check(at_least(1))
      ->type_name("NUMBER")
      ->group("Batch and memory");
  app.add_option("--device", settings.device, "cpu, or an accelerator as torch names it")
      ->type_name("NAME")
      ->capture_default_str()
      ->group("Batch and memory");
  add_json(app, settings);
}

void add_file(CLI::App& app, Settings& settings) {
  app.add_option("file", settings.file, "model.safetensors or a checkpoint, as train saves them")
      ->required()
      ->type_name("FILE")
      ->configurable(false);
}

void add_output(CLI::App& app, Settings& settings, const char* help) {
  app.add_option("--output", settings.output, help)
      ->required()
      ->check(not_empty("a path"))
      ->type_name("FILE");
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
  add_saving(command, settings);
}

void add_evaluate_flags(CLI::App& command, Settings& settings) {
  add_file(command, settings);
  add_saved_model(command, settings);
  add_metrics(command, settings);
}

void add_predict_flags(CLI::App& command, Settings& settings) {
  add_file(command, settings);
  add_output(command, settings, "the .npy file to write, one row a sample");
  command.add_flag("--scores", settings.scores, "a score for each class, before the softmax");
  add_saved_model(command, settings);
}

void add_export_flags(CLI::App& command, Settings& settings) {
  add_file(command, settings);
  add_output(command, settings, "the file to write: .pt for torch.load, or .safetensors");
  add_json(command, settings);
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
