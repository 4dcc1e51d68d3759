#pragma once

#include "data/dataset.hpp"

#include <string>

namespace infinitybatch::app {

/// Any file as a sequence of bytes: a sample is `context` bytes, its target the same window moved
/// by one. Windows do not overlap. The last `held_out` of the windows are kept for measuring.
/// \throws DataError where the file is too short for two windows
Dataset read_text(const std::string& path, int64_t context, double held_out);

}  // namespace infinitybatch::app
