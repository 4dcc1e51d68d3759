#include "store/model_file.hpp"

#include "build_info.hpp"
#include "errors.hpp"
#include "models/shared_library.hpp"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cstdio>
#include <set>

namespace infinitybatch::app {
namespace {

using Fields = nlohmann::ordered_json;

constexpr const char* kModelKey = "infinitybatch";
constexpr int64_t kPrintedRows = 256;

const std::vector<std::pair<std::string, SampleKind>> kKinds = {
    {"vectors", SampleKind::vectors}, {"images", SampleKind::images}, {"text", SampleKind::text}};

/// FNV-1a: tells data apart, and is no proof against somebody who wants two to look alike.
void hash_bytes(uint64_t& hash, const at::Tensor& tensor) {
  constexpr uint64_t kPrime = 1099511628211U;
  const at::Tensor values = tensor.contiguous();
  const auto* bytes = static_cast<const uint8_t*>(values.const_data_ptr());
  for (size_t i = 0; i < values.nbytes(); ++i) hash = (hash ^ bytes[i]) * kPrime;
}

Fields as_json(const Encoding& encoding) {
  return {{"format", encoding.format},         {"classes", encoding.classes},
          {"columns", encoding.columns},       {"image_shape", encoding.image_shape},
          {"image_size", encoding.image_size}, {"labels", encoding.labels},
          {"inputs", encoding.inputs},         {"mean", encoding.mean},
          {"deviation", encoding.deviation}};
}

Encoding encoding_in(const Fields& fields) {
  using Names = std::vector<std::string>;
  return {fields.at("format").get<std::string>(),
          fields.at("classes").get<Names>(),
          fields.at("columns").get<Names>(),
          fields.at("image_shape").get<std::vector<int64_t>>(),
          fields.at("image_size").get<std::string>(),
          fields.at("labels").get<std::string>(),
          fields.at("inputs").get<std::string>(),
          fields.at("mean").get<double>(),
          fields.at("deviation").get<double>()};
}

std::string sizes_text(at::IntArrayRef sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(sizes[i]);
  }
  return text + "]";
}

}  // namespace

std::string fingerprint_of(const Dataset& data) {
  uint64_t hash = 14695981039346656037U;
  const at::Tensor rows = at::arange(std::min(kPrintedRows, data.train.size), at::kLong);
  hash_bytes(hash, data.train.inputs(rows));
  hash_bytes(hash, data.train.targets(rows));
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
  return std::to_string(data.train.size) + "+" + std::to_string(data.held_out.size) + ":" + text;
}

ModelDescription describe_model(const ModelOptions& model, const DataOptions& options,
                                const Dataset& data) {
  return {model,        options, data.kind, data.sample_shape, data.classes, fingerprint_of(data),
          data.encoding};
}

Fields as_json(const ModelDescription& description) {
  const auto& [model, data, kind, shape, classes, fingerprint, encoding] = description;
  Fields fields = {{"version", version()},
                   {"model", model.model},
                   {"width", model.width},
                   {"depth", model.depth},
                   {"context", model.context}};
  for (const auto& [name, known] : kKinds) {
    if (known == kind) fields["kind"] = name;
  }
  fields.update({{"sample_shape", shape},
                 {"classes", classes},
                 {"data", data.data},
                 {"labels", data.labels},
                 {"inputs", data.inputs},
                 {"csv_header", data.csv_header},
                 {"image_size", data.image_size},
                 {"held_out", data.held_out ? Fields(*data.held_out) : Fields()},
                 {"fingerprint", fingerprint}});
  if (encoding) fields["encoding"] = as_json(*encoding);
  return fields;
}

ModelDescription description_in(const StoredTensors& stored) {
  const auto found = stored.metadata.find(kModelKey);
  if (found == stored.metadata.end()) {
    throw DataError(stored.path +
                    ": its metadata describe no model of infinitybatch; name a file that "
                    "infinitybatch train --save wrote");
  }
  ModelDescription description;
  try {
    const Fields fields = Fields::parse(found->second);
    auto& [model, data, kind, shape, classes, fingerprint, encoding] = description;
    model.model = fields.at("model").get<std::string>();
    model.width = fields.at("width").get<int64_t>();
    model.depth = fields.at("depth").get<int64_t>();
    model.context = fields.at("context").get<int64_t>();
    const auto kind_name = fields.at("kind").get<std::string>();
    for (const auto& [name, known] : kKinds) {
      if (name == kind_name) kind = known;
    }
    shape = fields.at("sample_shape").get<std::vector<int64_t>>();
    classes = fields.at("classes").get<int64_t>();
    data.data = fields.at("data").get<std::string>();
    data.labels = fields.at("labels").get<std::string>();
    // Files of earlier versions do not have these.
    data.inputs = fields.value("inputs", data.inputs);
    data.csv_header = fields.value("csv_header", data.csv_header);
    data.image_size = fields.value("image_size", data.image_size);
    if (!fields.at("held_out").is_null()) data.held_out = fields.at("held_out").get<double>();
    fingerprint = fields.at("fingerprint").get<std::string>();
    if (fields.contains("encoding")) encoding = encoding_in(fields["encoding"]);
  } catch (const Fields::exception&) {
    throw DataError(stored.path + ": the description of its model is damaged; save it again");
  }
  // A shared library may have no use for width and depth.
  const auto& [name, width, depth, context] = description.model;
  const bool sane = (is_shared_library(name) || (width > 0 && depth > 0)) &&
                    description.classes > 0 && !description.sample_shape.empty();
  if (!sane) {
    throw DataError(stored.path + ": the description of its model is damaged; save it again");
  }
  return description;
}

NamedTensors weights_of(const Network& network) {
  NamedTensors all;
  for (const auto& item : network.named_parameters()) all.emplace_back(item.key(), item.value());
  for (const auto& item : network.named_buffers()) all.emplace_back(item.key(), item.value());
  return all;
}

void save_model(const std::string& path, const Network& network,
                const ModelDescription& description) {
  write_safetensors(path, weights_of(network),
                    {{"format", "pt"}, {kModelKey, as_json(description).dump()}});
}

void load_weights(Network& network, const StoredTensors& stored) {
  const NamedTensors weights = weights_of(network);
  std::set<std::string> names;
  for (const auto& [name, tensor] : weights) {
    names.insert(name);
    const auto found = stored.tensors.find(name);
    if (found == stored.tensors.end()) {
      throw DataError(stored.path + ": has no tensor " + name + ", which its model has");
    }
    const at::Tensor& values = found->second;
    if (values.sizes() != tensor.sizes() || values.scalar_type() != tensor.scalar_type()) {
      throw DataError(stored.path + ": " + name + " is " + c10::toString(values.scalar_type()) +
                      " of " + sizes_text(values.sizes()) + ", the model's is " +
                      c10::toString(tensor.scalar_type()) + " of " + sizes_text(tensor.sizes()) +
                      "; it is of another model");
    }
  }
  for (const auto& [name, tensor] : stored.tensors) {
    if (name.find('/') == name.npos && names.count(name) == 0) {
      throw DataError(stored.path + ": holds a tensor " + name +
                      ", which its model does not have; it is of another model");
    }
  }
  const c10::AutoGradMode no_grad(false);
  for (const auto& [name, tensor] : weights) tensor.copy_(stored.tensors.at(name));
}

std::shared_ptr<Network> network_in(const StoredTensors& stored,
                                    const ModelDescription& description) {
  Dataset shape;
  shape.name = description.data.data;
  shape.kind = description.kind;
  shape.sample_shape = description.sample_shape;
  shape.classes = description.classes;
  ModelOptions model = description.model;
  std::shared_ptr<Network> network;
  try {
    network = make_network(model, shape);
  } catch (const UsageError& error) {
    throw DataError(stored.path + ": its model cannot be made: " + error.what_without_backtrace());
  }
  load_weights(*network, stored);
  return network;
}

}  // namespace infinitybatch::app
