#pragma once

#include "errors.hpp"

#include <string>

namespace infinitybatch::app {

/// What says that a file has to be unpacked first, and how; gunzip wants its ending.
DataError compressed(const std::string& path);

/// \throws DataError where the file begins as gzip's do
void refuse_compressed(const std::string& path);

}  // namespace infinitybatch::app
