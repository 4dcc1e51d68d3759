#include <infinitybatch/memory/budget.hpp>

#include <infinitybatch/core/bytes.hpp>
#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/memory/statistics.hpp>

#include <cmath>
#include <locale>
#include <optional>
#include <sstream>

namespace infinitybatch::memory {
namespace {

constexpr const char* kExamples =
    "; write bytes as a whole number (536870912) or \"512MiB\", a fraction of the device with a "
    "point or as a percentage (0.8, \"80%\", 1.0 for all of it), or \"auto\"";
constexpr double kAutoShare = 0.9;

int64_t checked_bytes(int64_t bytes, const std::string& name, const std::string& written) {
  if (bytes < 1) {
    throw InvalidArgument(name + " is " + written + ", but a budget has at least one byte" +
                          kExamples);
  }
  return bytes;
}

double checked_fraction(double fraction, const std::string& name, const std::string& written) {
  if (!(fraction > 0.0 && fraction <= 1.0)) {  // also not a number
    throw InvalidArgument(name + " is " + written +
                          ", but a fraction of the device is above 0 and at most 1" + kExamples);
  }
  return fraction;
}

std::string written(double number) {
  std::ostringstream text;
  text.imbue(std::locale::classic());
  text << number;
  return text.str();
}

/// A bare number with a point in it, as in "0.8", or one of percent, as in "80%". Empty for
/// anything else.
std::optional<double> as_fraction(std::string text) {
  const size_t end = text.find_last_not_of(" \t");
  const bool is_percent = end != std::string::npos && text[end] == '%';
  if (is_percent) text.resize(end);
  if (!is_percent && text.find('.') == std::string::npos) return std::nullopt;
  std::istringstream stream(text);
  stream.imbue(std::locale::classic());
  double number = 0.0;
  if (stream >> number && (stream >> std::ws).eof()) return is_percent ? number / 100 : number;
  return std::nullopt;
}

}  // namespace

Budget::Budget(int64_t bytes, std::string name)
    : value_(checked_bytes(bytes, name, std::to_string(bytes))),
      text_(std::to_string(bytes)),
      name_(std::move(name)) {}

Budget::Budget(double fraction, std::string name)
    : value_(checked_fraction(fraction, name, written(fraction))),
      text_(written(fraction)),
      name_(std::move(name)) {}

Budget::Budget(const std::string& text, std::string name) : text_(text), name_(std::move(name)) {
  if (text == "auto") {
    value_ = Auto{};
  } else if (const auto fraction = as_fraction(text)) {
    value_ = checked_fraction(*fraction, name_, "\"" + text + "\"");
  } else {
    int64_t bytes = 0;
    try {
      bytes = parse_bytes(text);
    } catch (const InvalidArgument&) {
      throw InvalidArgument(name_ + " is \"" + text + "\", which is not a valid memory budget" +
                            kExamples);
    }
    value_ = checked_bytes(bytes, name_, "\"" + text + "\"");
  }
}

int64_t Budget::resolve(c10::Device device) const {
  if (const auto* bytes = std::get_if<int64_t>(&value_)) return *bytes;
  const Statistics now = stats(device);
  if (now.total <= 0) {
    throw Unsupported(name_ + " is \"" + text_ + "\", but the device '" + device.str() +
                      "' does not say how much memory it has; give bytes, for example \"512MiB\"");
  }
  const auto* fraction = std::get_if<double>(&value_);
  const double bytes =
      fraction != nullptr
          ? *fraction * static_cast<double>(now.total)
          : static_cast<double>(now.live) + kAutoShare * static_cast<double>(available(device));
  return checked_bytes(static_cast<int64_t>(std::floor(bytes)), name_,
                       "\"" + text_ + "\", no memory at all on '" + device.str() + "'");
}

}  // namespace infinitybatch::memory
