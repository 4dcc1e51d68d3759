#include <infinitybatch/core/bytes.hpp>

#include <infinitybatch/core/errors.hpp>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <limits>
#include <system_error>

namespace infinitybatch {
namespace {

struct Unit {
  const char* name;
  double bytes;
};

constexpr std::array<Unit, 14> kUnits{{{"", 1.0},
                                       {"b", 1.0},
                                       {"kb", 1e3},
                                       {"mb", 1e6},
                                       {"gb", 1e9},
                                       {"tb", 1e12},
                                       {"k", 1e3},
                                       {"m", 1e6},
                                       {"g", 1e9},
                                       {"t", 1e12},
                                       {"kib", 0x1p10},
                                       {"mib", 0x1p20},
                                       {"gib", 0x1p30},
                                       {"tib", 0x1p40}}};

/// In the largest unit that leaves a number of at least 1, with one digit after the point where
/// there are fewer than three before it.
template <typename Round>
std::string written(int64_t bytes, const Round& round) {
  constexpr std::array<const char*, 5> names{"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  // 1023.5 KiB would be rounded to "1024 KiB".
  while (std::abs(value) >= (unit == 0 ? 1024.0 : 1023.5) && unit + 1 < names.size()) {
    value /= 1024.0;
    ++unit;
  }
  const double tenths = round(value * 10.0) / 10.0;
  const bool whole = std::abs(value) >= 100.0 || tenths == std::floor(tenths);
  std::array<char, 32> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(),
                                 std::abs(value) >= 100.0 ? round(value) : tenths,
                                 std::chars_format::fixed, whole ? 0 : 1);
  return std::string(digits.data(), end.ptr) + ' ' + names[unit];
}

}  // namespace

// Numbers are read and written without the C library's locale, in which a point may be a comma.
int64_t parse_bytes(const std::string& text) {
  const auto is_space = [](unsigned char c) { return std::isspace(c) != 0; };
  const char* const end = text.data() + text.size();
  const char* const start = std::find_if_not(text.data(), end, is_space);
  double number = 0.0;
  const auto [behind, error] = std::from_chars(start, end, number);
  std::string unit;
  for (const char* c = behind; c != end; ++c) {
    if (!is_space(*c)) unit += static_cast<char>(std::tolower(static_cast<unsigned char>(*c)));
  }
  if (error == std::errc() && std::isfinite(number) && number >= 0) {
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
  return written(bytes, [](double value) { return std::round(value); });
}

std::string format_bytes_up(int64_t bytes) {
  return written(bytes, [](double value) { return std::ceil(value); });
}

}  // namespace infinitybatch
