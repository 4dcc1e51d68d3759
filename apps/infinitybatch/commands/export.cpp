#include "commands/commands.hpp"
#include "errors.hpp"
#include "output/json_lines.hpp"
#include "output/numbers.hpp"
#include "output/terminal.hpp"
#include "store/model_file.hpp"
#include "store/torch_file.hpp"

#include <filesystem>

namespace infinitybatch::app {

ExitCode run_export(const Settings& settings) {
  const StoredTensors stored = read_safetensors(settings.file);
  const ModelDescription description = description_in(stored);
  const auto network = network_in(stored, description);
  const bool torch = std::filesystem::path(settings.output).extension() == ".pt";
  if (torch) {
    write_torch_file(settings.output, weights_of(*network));
  } else {
    save_model(settings.output, *network, description);
  }
  const NamedTensors weights = weights_of(*network);
  Terminal terminal(settings.json ? stderr : stdout);
  terminal.line(
      settings.output + ": " + with_commas(static_cast<int64_t>(weights.size())) + " tensors of " +
      description.model.model + "; read them with " +
      (torch ? "torch.load(path, weights_only=True)" : "safetensors.torch.load_file(path)"));
  if (settings.json) {
    write_json("export", {{"file", settings.file},
                          {"output", settings.output},
                          {"format", torch ? "pt" : "safetensors"},
                          {"tensors", weights.size()},
                          {"description", as_json(description)}});
  }
  return ExitCode::ok;
}

}  // namespace infinitybatch::app
