#include "loss/tiles.hpp"

#include <infinitybatch/core/errors.hpp>

#include <algorithm>

namespace infinitybatch::losses {
namespace {
constexpr int64_t kLeastBytes = int64_t{1} << 20;
constexpr int64_t kMostRows = 256;
}  // namespace

int64_t default_tile(int64_t columns, int64_t features, int64_t itemsize) {
  const int64_t row_bytes = std::max<int64_t>(columns * itemsize, 1);
  return std::clamp<int64_t>(std::max(features, kLeastBytes / row_bytes), 1, kMostRows);
}

void check_tile(const std::string& name, std::optional<int64_t> tile) {
  if (!tile || *tile >= 1) return;
  throw InvalidArgument(name + ": tile is a number of rows, 1 or more, not " +
                        std::to_string(*tile) + "; leave it out to have it chosen");
}

int64_t rows_of_tile(const std::string& name, std::optional<int64_t> wanted, int64_t rows,
                     int64_t columns, int64_t features, int64_t itemsize) {
  check_tile(name, wanted);
  const int64_t tile = wanted.value_or(default_tile(columns, features, itemsize));
  return std::clamp<int64_t>(tile, 1, std::max<int64_t>(rows, 1));
}

}  // namespace infinitybatch::losses
