#pragma once

#include "data/dataset.hpp"
#include "models/network.hpp"

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <optional>

namespace infinitybatch::app {

/// `make_network` on `device`, refused as soon as its parameters alone pass the budget. Ctrl-C
/// counts meanwhile.
/// \param budget bytes; without one what is free in the machine's memory bounds what is made
/// \throws BudgetExceeded; DataError for samples of one class; what make_network throws
std::shared_ptr<Network> make_network_in_budget(ModelOptions& options, const Dataset& data,
                                                c10::Device device, std::optional<int64_t> budget);

}  // namespace infinitybatch::app
