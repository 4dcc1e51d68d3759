#pragma once

#include "store/safetensors.hpp"

#include <string>

namespace infinitybatch::app {

/// Writes a dictionary of tensors that `torch.load(path, weights_only=True)` reads.
/// \throws SaveError
void write_torch_file(const std::string& path, const NamedTensors& tensors);

}  // namespace infinitybatch::app
