#include "output/describe.hpp"

#include "offload/disk_file.hpp"
#include "output/numbers.hpp"

#include <infinitybatch/core/bytes.hpp>

namespace infinitybatch::app {
namespace {

struct Size {
  int64_t count = 0;
  int64_t bytes = 0;
};

Size size_of(const Network& network) {
  Size size;
  for (const at::Tensor& parameter : network.parameters()) {
    size.count += parameter.numel();
    size.bytes += static_cast<int64_t>(parameter.nbytes());
  }
  return size;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text;
  for (int64_t size : shape) {
    text += (text.empty() ? "" : "x") + std::to_string(size);
  }
  return text;
}

std::string kind_text(SampleKind kind) {
  switch (kind) {
    case SampleKind::text:
      return "windows of text";
    case SampleKind::vectors:
      return "vectors";
    case SampleKind::images:
      break;
  }
  return "images";
}

}  // namespace

std::vector<std::string> describe_job(const Dataset& data, const Settings& settings,
                                      const Network& network) {
  const Size size = size_of(network);
  const auto& step = settings.training.step;
  const std::string samples = data.name + ": " + with_commas(data.train.size) + " " +
                              kind_text(data.kind) + " of " + shape_text(data.sample_shape) +
                              " to train, " + with_commas(data.held_out.size) + " held out, " +
                              std::to_string(data.classes) + " classes";
  const std::string model = settings.model.model + " (width " +
                            std::to_string(settings.model.width) + ", depth " +
                            std::to_string(settings.model.depth) + "): " + with_commas(size.count) +
                            " parameters, " + format_bytes(size.bytes);
  std::string batch = "batch of " + with_commas(batch_size_for(step, data)) +
                      (step.batch_size ? " samples" : " samples (all)") + ", strategy " +
                      step.strategy + " on " + settings.training.device.str() + ", ";
  if (step.memory_budget) {
    batch += "memory budget " + format_bytes(*step.memory_budget);
  } else {
    // Without one VirtualBatch takes most of what is free; plain training takes what it takes.
    batch += step.strategy == "native" ? "no memory budget" : "memory budget auto";
  }
  const auto when = step.offload.when;
  if (when != Offload::When::automatic) {
    batch += ", offload " + settings.offload;
  }
  if (step.offload.host_budget) {
    batch += ", host budget " + format_bytes(step.offload.host_budget->resolve(c10::kCPU));
  }
  return {samples, model, batch};
}

std::string offload_place(const StepOptions& step, c10::Device device) {
  const Offload& offload = step.offload;
  const std::string disk =
      "on disk (" + (offload.directory.empty() ? offload::default_directory() : offload.directory) +
      ")";
  if (offload.host_budget) {
    return "on the host (up to " + format_bytes(offload.host_budget->resolve(c10::kCPU)) +
           "), then " + disk;
  }
  return device.is_cpu() ? disk : "on the host (up to half of what was free), then " + disk;
}

nlohmann::ordered_json job_as_json(const Dataset& data, const Settings& settings,
                                   const Network& network) {
  using Json = nlohmann::ordered_json;
  const Size size = size_of(network);
  const auto& step = settings.training.step;
  return {{"data", data.name},
          {"samples", data.train.size},
          {"held_out", data.held_out.size},
          {"sample_shape", data.sample_shape},
          {"classes", data.classes},
          {"model", settings.model.model},
          {"width", settings.model.width},
          {"depth", settings.model.depth},
          {"parameters", size.count},
          {"parameter_bytes", size.bytes},
          {"batch_size", batch_size_for(step, data)},
          {"micro_batch_size", step.micro_batch_size ? Json(*step.micro_batch_size) : Json()},
          {"memory_budget", step.memory_budget ? Json(*step.memory_budget) : Json()},
          {"offload", settings.offload},
          {"host_budget",
           step.offload.host_budget ? Json(step.offload.host_budget->resolve(c10::kCPU)) : Json()},
          {"device", settings.training.device.str()}};
}

}  // namespace infinitybatch::app
