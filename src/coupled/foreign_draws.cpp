#include "coupled/foreign_draws.hpp"

#include "core/rng.hpp"

#include <infinitybatch/core/errors.hpp>

namespace infinitybatch::coupled {

ForeignDraws::ForeignDraws(bool watched) {
  if (watched) before_ = tell_foreign_sources();
}

std::optional<std::string> ForeignDraws::drew() const {
  if (before_.empty()) return std::nullopt;
  for (const auto& [name, state] : tell_foreign_sources()) {
    const auto known = before_.find(name);
    if (known != before_.end() && known->second != state) return name;
  }
  return std::nullopt;
}

void refuse_draws(const std::string& drew, int64_t rows, int64_t total) {
  throw CouplingError(drew, drew + " draws random numbers, and micro-batches of " +
                                std::to_string(rows) + " do not draw those of all " +
                                std::to_string(total) +
                                " by themselves, as match_native_rng asks for");
}

}  // namespace infinitybatch::coupled
