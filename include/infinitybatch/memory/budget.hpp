#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <utility>
#include <variant>

namespace infinitybatch::memory {

/// How much the tensors of a step may occupy on a device: bytes, "512MiB", a fraction of the device
/// (0 < f <= 1, also as text: "0.8", "80%"), or "auto" (what is live now plus 90 % of what is
/// free). Every constructor throws InvalidArgument for what is none of these. `name` is what
/// messages call it: an option of the user's.
class Budget {
 public:
  // NOLINTBEGIN(google-explicit-constructor): written as a plain number, or text
  Budget(int64_t bytes, std::string name = kUnnamed);
  Budget(int bytes, std::string name = kUnnamed)
      : Budget(static_cast<int64_t>(bytes), std::move(name)) {}
  Budget(double fraction, std::string name = kUnnamed);
  Budget(const std::string& text, std::string name = kUnnamed);
  Budget(const char* text, std::string name = kUnnamed)
      : Budget(std::string(text), std::move(name)) {}
  // NOLINTEND(google-explicit-constructor)

  /// The bytes that this means on `device` now.
  /// \throws Unsupported where the device does not say how much memory it has
  int64_t resolve(c10::Device device) const;
  /// As the user wrote it.
  const std::string& text() const noexcept { return text_; }

 private:
  struct Auto {};
  static constexpr const char* kUnnamed = "the budget";

  std::variant<int64_t, double, Auto> value_;
  std::string text_;
  std::string name_;
};

}  // namespace infinitybatch::memory
