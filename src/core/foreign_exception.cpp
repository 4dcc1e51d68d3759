#include "core/foreign_exception.hpp"

#include <utility>
#include <vector>

namespace infinitybatch {
namespace {

using Keeper = std::function<void(const std::exception_ptr&)>;

std::vector<Keeper>& keepers() {
  static std::vector<Keeper> list;
  return list;
}

}  // namespace

void keep_foreign_exception(const std::exception_ptr& error) noexcept {
  for (const Keeper& keeper : keepers()) keeper(error);
}

void register_exception_keeper(Keeper keeper) {
  keepers().push_back(std::move(keeper));
}

}  // namespace infinitybatch
