#include <infinitybatch/core/bytes.hpp>

#include <infinitybatch/core/errors.hpp>

#include <array>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>

namespace infinitybatch {
namespace {

struct Unit {
  const char* name;
  double bytes;
};

constexpr std::array<Unit, 10> kUnits{{{"", 1.0},
                                       {"b", 1.0},
                                       {"kb", 1e3},
                                       {"mb", 1e6},
                                       {"gb", 1e9},
                                       {"tb", 1e12},
                                       {"kib", 0x1p10},
                                       {"mib", 0x1p20},
                                       {"gib", 0x1p30},
                                       {"tib", 0x1p40}}};

}  // namespace

int64_t parse_bytes(const std::string& text) {
  const char* start = text.c_str();
  char* end = nullptr;
  const double number = std::strtod(start, &end);
  std::string unit;
  for (const char* c = end; *c != '\0'; ++c) {
    if (std::isspace(static_cast<unsigned char>(*c)) == 0) {
      unit += static_cast<char>(std::tolower(static_cast<unsigned char>(*c)));
    }
  }
  if (end != start && std::isfinite(number) && number >= 0) {
    for (const Unit& known : kUnits) {
      if (unit != known.name) continue;
      const double bytes = std::floor(number * known.bytes);
      if (bytes < static_cast<double>(std::numeric_limits<int64_t>::max())) {
        return static_cast<int64_t>(bytes);
      }
    }
  }
  throw InvalidArgument("\"" + text +
                        "\" is no number of bytes; write for example 536870912, \"512MiB\" or "
                        "\"1.5GB\"");
}

std::string format_bytes(int64_t bytes) {
  constexpr std::array<const char*, 5> names{"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (std::abs(value) >= 1024.0 && unit + 1 < names.size()) {
    value /= 1024.0;
    ++unit;
  }
  char text[64];
  const bool whole = unit == 0 || std::abs(value) >= 100.0 || value == std::floor(value);
  std::snprintf(text, sizeof text, whole ? "%.0f %s" : "%.1f %s", value, names[unit]);
  return text;
}

}  // namespace infinitybatch
