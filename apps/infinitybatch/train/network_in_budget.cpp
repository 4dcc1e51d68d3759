#include "train/network_in_budget.hpp"

#include "errors.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/memory/budget.hpp>
#include <infinitybatch/memory/limit.hpp>

#include <c10/util/Exception.h>

#include <string>

namespace infinitybatch::app {

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
