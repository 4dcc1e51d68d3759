#include "core/engine_error.hpp"

#include <utility>
#include <vector>

namespace infinitybatch {
namespace {

using Thrower = std::function<void(const std::exception_ptr&)>;

std::vector<Thrower>& throwers() {
  static std::vector<Thrower> list;
  return list;
}

}  // namespace

void throw_through_engine(const std::exception_ptr& error) {
  for (const Thrower& thrower : throwers()) thrower(error);
  std::rethrow_exception(error);
}

void register_engine_thrower(Thrower thrower) {
  throwers().push_back(std::move(thrower));
}

}  // namespace infinitybatch
