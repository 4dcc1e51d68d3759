#include "train/network_in_budget.hpp"

#include "errors.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/memory/budget.hpp>
#include <infinitybatch/memory/limit.hpp>

#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <string>

namespace infinitybatch::app {
namespace {

int64_t as_bytes(double bytes) {
  constexpr double kMost = 0x1p62;
  return static_cast<int64_t>(std::min(bytes, kMost));
}

/// Before anything is made, which takes long where it is much.
void refuse_what_cannot_fit(const ModelOptions& options, const Dataset& data, int64_t most) {
  const std::optional<NetworkSize> size = size_of_network(options, data);
  if (!size) return;
  const std::string flags =
      "--width " + std::to_string(options.width) + ", --depth " + std::to_string(options.depth);
  const int64_t numbers = as_bytes(size->parameters * sizeof(float));
  if (numbers > most) {
    throw BudgetExceeded(numbers, most, std::nullopt, "the model alone (" + flags + ")");
  }
  // A tensor and its module take some memory beside their numbers, which no budget counts.
  constexpr double kBytesPerTensor = 1024;
  const int64_t objects = as_bytes(size->tensors * kBytesPerTensor);
  const int64_t free = memory::Budget("auto").resolve(c10::kCPU);
  if (objects > free) {
    throw BudgetExceeded(objects, free, std::nullopt,
                         "holding the model's layers in host memory (" + flags + ")");
  }
}

}  // namespace

std::shared_ptr<Network> make_network_in_budget(ModelOptions& options, const Dataset& data,
                                                c10::Device device, std::optional<int64_t> budget) {
  if (data.has_one_class) {
    throw DataError(data.name +
                    ": all samples are of one class, which leaves nothing to learn; give labels of "
                    "two classes or more");
  }
  // Parameters are made on the CPU, where a budget of another device says nothing.
  if (!device.is_cpu()) budget.reset();
  const int64_t most = budget ? *budget : memory::Budget("auto").resolve(c10::kCPU);
  complete(options, data);
  refuse_what_cannot_fit(options, data, most);
  const memory::Limit limit(most);
  std::shared_ptr<Network> network;
  try {
    network = make_network(options, data);
  } catch (const c10::OutOfMemoryError&) {
    throw BudgetExceeded(limit.refused(), most, std::nullopt,
                         "the model alone (--width " + std::to_string(options.width) +
                             ", --depth " + std::to_string(options.depth) + ")");
  }
  network->to(device);
  return network;
}

}  // namespace infinitybatch::app
