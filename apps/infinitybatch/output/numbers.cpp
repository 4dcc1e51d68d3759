#include "output/numbers.hpp"

#include <cmath>
#include <cstdio>

namespace infinitybatch::app {
namespace {

template <typename... Values>
std::string print(const char* format, Values... values) {
  char text[64];
  std::snprintf(text, sizeof text, format, values...);
  return text;
}

}  // namespace

std::string with_commas(int64_t number) {
  std::string digits = std::to_string(number < 0 ? -number : number);
  for (int64_t at = static_cast<int64_t>(digits.size()) - 3; at > 0; at -= 3) {
    digits.insert(static_cast<size_t>(at), 1, ',');
  }
  return (number < 0 ? "-" : "") + digits;
}

std::string fixed(double number, int digits) {
  return std::isfinite(number) ? print("%.*f", digits, number) : "-";
}

std::string duration(double seconds) {
  if (!std::isfinite(seconds)) {
    return "-";
  }
  if (seconds < 59.95) {
    return print("%.1f s", seconds);
  }
  const auto whole = static_cast<long long>(std::llround(seconds));
  if (whole < 3600) {
    return print("%lld min %02lld s", whole / 60, whole % 60);
  }
  return print("%lld h %02lld min", whole / 3600, whole % 3600 / 60);
}

std::string shortest(double number) {
  return print("%.4g", number);
}

}  // namespace infinitybatch::app
