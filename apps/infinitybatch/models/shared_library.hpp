#pragma once

#include "models/network.hpp"

#include <memory>
#include <string>

namespace infinitybatch::app {

/// Whether `--model` names a shared library and not one of `model_names`.
bool is_shared_library(const std::string& model);

/// The network that the library makes, which stays loaded.
/// \throws UsageError where it cannot be loaded, or was built for another torch
std::shared_ptr<Network> load_network(const std::string& path,
                                      const command_line::Samples& samples);

}  // namespace infinitybatch::app
