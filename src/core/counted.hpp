#pragma once

#include <cstdint>
#include <string>

namespace infinitybatch {

/// For messages: "the one <one>", or "each of the 3 <many>".
std::string each_of(int64_t count, const std::string& one, const std::string& many);

}  // namespace infinitybatch
