#include <infinitybatch/coupled/one_of_many.hpp>

namespace infinitybatch::coupled {
namespace {

thread_local bool now = false;

}  // namespace

OneOfMany::OneOfMany(bool at_work) : outer_(now) {
  now = at_work;
}

OneOfMany::~OneOfMany() {
  now = outer_;
}

bool OneOfMany::at_work() noexcept {
  return now;
}

}  // namespace infinitybatch::coupled
