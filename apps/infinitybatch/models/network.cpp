#include "models/network.hpp"

#include "errors.hpp"
#include "models/shared_library.hpp"

#include <algorithm>

namespace infinitybatch::app {
namespace {

struct Description {
  std::string name;
  int64_t width;       ///< default
  int64_t depth;       ///< default
  int64_t width_step;  ///< widths must be multiples of it
};

// Widths: groups of a GroupNorm have 8 channels, heads of the attention 16 numbers.
const std::vector<Description> kModels = {{"mlp", 256, 2, 1},
                                          {"convnet", 32, 3, 8},
                                          {"resnet", 32, 1, 1},
                                          {"resnet-groupnorm", 32, 1, 8},
                                          {"transformer", 64, 2, 16}};

int64_t product(const std::vector<int64_t>& shape) {
  int64_t result = 1;
  for (int64_t size : shape) {
    result *= size;
  }
  return result;
}

std::string suiting(SampleKind kind) {
  switch (kind) {
    case SampleKind::text:
      return "transformer";
    case SampleKind::vectors:
      return "mlp";
    case SampleKind::images:
      break;
  }
  return "resnet";
}

void check_kind(const std::string& model, const Dataset& data) {
  const bool is_text = data.kind == SampleKind::text;
  if ((model == "transformer") != is_text) {
    throw UsageError("--model " + model + " cannot take " +
                     (is_text ? "text" : "images or vectors") + " (--data " + data.name +
                     "); use --model " + suiting(data.kind));
  }
  if (model != "mlp" && data.kind == SampleKind::vectors) {
    throw UsageError("--model " + model + " takes images, but --data " + data.name +
                     " holds vectors; use --model mlp, or shape the data [n, height, width]");
  }
}

}  // namespace

const std::vector<std::string>& model_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> result;
    for (const Description& model : kModels) {
      result.push_back(model.name);
    }
    return result;
  }();
  return names;
}

void complete(ModelOptions& options, const Dataset& data) {
  if (options.model.empty()) {
    options.model = suiting(data.kind);
  }
  if (is_shared_library(options.model)) return;
  const auto found = std::find_if(kModels.begin(), kModels.end(), [&](const Description& model) {
    return model.name == options.model;
  });
  if (found == kModels.end()) {
    throw UsageError("--model " + options.model + " is not known");
  }
  check_kind(found->name, data);
  options.width = options.width == 0 ? found->width : options.width;
  options.depth = options.depth == 0 ? found->depth : options.depth;
  if (options.width % found->width_step != 0) {
    throw UsageError("--width " + std::to_string(options.width) + " does not suit --model " +
                     found->name + "; it must be a multiple of " +
                     std::to_string(found->width_step));
  }
}

std::shared_ptr<Network> make_network(ModelOptions& options, const Dataset& data) {
  complete(options, data);
  if (is_shared_library(options.model)) {
    return load_network(options.model,
                        {data.sample_shape, data.classes, options.width, options.depth});
  }
  const std::string& name = options.model;
  const auto& shape = data.sample_shape;
  if (name == "mlp") {
    return make_mlp(product(shape), options.width, options.depth, data.classes);
  }
  if (name == "convnet") {
    return make_convnet(shape.front(), options.width, options.depth, data.classes);
  }
  if (name == "resnet" || name == "resnet-groupnorm") {
    const auto kind = name == "resnet" ? Normalization::batch : Normalization::group;
    return make_resnet(kind, shape.front(), options.width, options.depth, data.classes);
  }
  return make_transformer(data.classes, shape.front(), options.width, options.depth);
}

}  // namespace infinitybatch::app
