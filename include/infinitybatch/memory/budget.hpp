#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <variant>

namespace infinitybatch::memory {

/// How much the tensors of a step may occupy on a device: bytes, "512MiB", a fraction of the device
/// (0 < f <= 1, also as text: "0.8"), or "auto" (what is live now plus 90 % of what is free).
/// Every constructor throws InvalidArgument for what is none of these.
class Budget {
 public:
  Budget(int64_t bytes);                                      // NOLINT: written as a plain number
  Budget(int bytes) : Budget(static_cast<int64_t>(bytes)) {}  // NOLINT
  Budget(double fraction);                                    // NOLINT
  Budget(const std::string& text);                            // NOLINT
  Budget(const char* text) : Budget(std::string(text)) {}     // NOLINT

  /// The bytes that this means on `device` now.
  /// \throws Unsupported where the device does not say how much memory it has
  int64_t resolve(c10::Device device) const;
  /// As the user wrote it.
  const std::string& text() const noexcept { return text_; }

 private:
  struct Auto {};

  std::variant<int64_t, double, Auto> value_;
  std::string text_;
};

}  // namespace infinitybatch::memory
