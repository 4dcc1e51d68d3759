#include "models/network.hpp"
#include "models/shared_library.hpp"

namespace infinitybatch::app {
namespace {

NetworkSize linear(double from, double to) {
  return {from * to + to, 2};
}

NetworkSize operator+(const NetworkSize& a, const NetworkSize& b) {
  return {a.parameters + b.parameters, a.tensors + b.tensors};
}

NetworkSize operator*(double times, const NetworkSize& size) {
  return {times * size.parameters, times * size.tensors};
}

/// Without a bias, and the normalisation behind it.
NetworkSize normalized(double from, double to, double kernel) {
  return {from * to * kernel * kernel + 2 * to, 3};
}

NetworkSize mlp(double features, double width, double depth, double classes) {
  return linear(features, width) + (depth - 1) * linear(width, width) + linear(width, classes);
}

NetworkSize convnet(double channels, double width, double depth, double classes) {
  return linear(9 * channels, width) + (depth - 1) * linear(9 * width, width) +
         linear(4 * width, classes);
}

NetworkSize resnet(double channels, double width, double depth, double classes) {
  const double wide = 2 * width;
  const NetworkSize first_stage = depth * (2 * normalized(width, width, 3));
  const NetworkSize second_stage = normalized(width, wide, 3) + normalized(wide, wide, 3) +
                                   normalized(width, wide, 1) +
                                   (depth - 1) * (2 * normalized(wide, wide, 3));
  return normalized(channels, width, 3) + first_stage + second_stage + linear(4 * wide, classes);
}

NetworkSize transformer(double symbols, double context, double width, double depth) {
  const NetworkSize norm{2 * width, 2};
  const NetworkSize layer = 2 * norm + linear(width, 3 * width) + linear(width, width) +
                            linear(width, 4 * width) + linear(4 * width, width);
  return NetworkSize{(symbols + context) * width, 2} + depth * layer + norm +
         linear(width, symbols);
}

}  // namespace

std::optional<NetworkSize> size_of_network(const ModelOptions& options, const Dataset& data) {
  if (is_shared_library(options.model)) return std::nullopt;
  const auto width = static_cast<double>(options.width);
  const auto depth = static_cast<double>(options.depth);
  const auto classes = static_cast<double>(data.classes);
  const auto first = static_cast<double>(data.sample_shape.front());
  if (options.model == "transformer") return transformer(classes, first, width, depth);
  if (options.model == "convnet") return convnet(first, width, depth, classes);
  if (options.model != "mlp") return resnet(first, width, depth, classes);
  double features = 1;
  for (const int64_t size : data.sample_shape) features *= static_cast<double>(size);
  return mlp(features, width, depth, classes);
}

}  // namespace infinitybatch::app
