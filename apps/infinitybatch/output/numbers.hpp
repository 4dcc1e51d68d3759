#pragma once

#include <cstdint>
#include <string>

namespace infinitybatch::app {

/// "1,438"
std::string with_commas(int64_t number);
/// `digits` places after the point; "-" for what is no number.
std::string fixed(double number, int digits);
/// "8.1 s", "2 min 05 s", "1 h 02 min"
std::string duration(double seconds);
/// Four significant digits at most, as people write learning rates: "0.003", "1e-05".
std::string shortest(double number);

}  // namespace infinitybatch::app
