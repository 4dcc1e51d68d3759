#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace infinitybatch::coupled {

/// Notices draws from random generators that are not torch's (Python's, NumPy's) since it was made.
class ForeignDraws {
 public:
  /// \param watched false: nothing is looked at
  explicit ForeignDraws(bool watched);
  /// The module that a number was drawn from.
  std::optional<std::string> drew() const;

 private:
  std::map<std::string, std::string> before_;
};

/// Numbers of the whole batch are asked for, and a part of it has drawn its own.
/// \param drew an operator, or a module
/// \throws CouplingError
[[noreturn]] void refuse_draws(const std::string& drew, int64_t rows, int64_t total);

}  // namespace infinitybatch::coupled
