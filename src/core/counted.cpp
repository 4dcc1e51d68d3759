#include "core/counted.hpp"

namespace infinitybatch {

std::string each_of(int64_t count, const std::string& one, const std::string& many) {
  return count == 1 ? "the one " + one : "each of the " + std::to_string(count) + " " + many;
}

}  // namespace infinitybatch
