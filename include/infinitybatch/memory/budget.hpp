#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <variant>

namespace infinitybatch::memory {

/// How much the tensors of a step may occupy on a device: bytes, "512MiB", a fraction of the device
/// (0 < f <= 1), or "auto" (what is live now plus 90 % of what is free).
class Budget {
 public:
  Budget(int64_t bytes);             // NOLINT: written as a plain number
  Budget(int bytes) : Budget(static_cast<int64_t>(bytes)) {}  // NOLINT
  Budget(double fraction);           // NOLINT
  Budget(const std::string& text);   // NOLINT
  Budget(const char* text) : Budget(std::string(text)) {}  // NOLINT

  /// The bytes that this means on `device` now.
  int64_t resolve(c10::Device device) const;
  /// As the user wrote it.
  std::string text() const;

 private:
  struct Auto {};
  std::variant<int64_t, double, Auto> value_;
};

}  // namespace infinitybatch::memory
