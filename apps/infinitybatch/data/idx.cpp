#include "data/idx.hpp"

#include "data/array.hpp"
#include "data/compressed.hpp"
#include "data/mapped_file.hpp"
#include "errors.hpp"

#include <fstream>
#include <vector>

namespace infinitybatch::app {
namespace {

constexpr uint8_t kUnsignedByte = 0x08;
constexpr int64_t kMostDimensions = 4;

int64_t big_endian(const uint8_t* bytes) {
  return (int64_t{bytes[0]} << 24) | (int64_t{bytes[1]} << 16) | (int64_t{bytes[2]} << 8) |
         int64_t{bytes[3]};
}

}  // namespace

bool looks_like_idx(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  char head[4] = {};
  return file.read(head, sizeof head) && head[0] == 0 && head[1] == 0 && head[2] >= 0x08 &&
         head[2] <= 0x0E && head[3] >= 1 && head[3] <= kMostDimensions;
}

at::Tensor read_idx(const std::string& path) {
  refuse_compressed(path);
  auto file = MappedFile::open(path);
  const uint8_t* head = file->data();
  if (file->size() < 4 || head[0] != 0 || head[1] != 0) {
    throw DataError(path + ": is no IDX file (it must begin with two zero bytes)");
  }
  if (head[2] != kUnsignedByte) {
    throw DataError(path + ": has IDX element type " + std::to_string(head[2]) +
                    " where 8 (unsigned bytes) alone is read; convert it to a NumPy .npy file");
  }
  const int64_t dimensions = head[3];
  const int64_t offset = 4 + 4 * dimensions;
  if (dimensions < 1 || dimensions > kMostDimensions || file->size() < offset) {
    throw DataError(path + ": says it has " + std::to_string(dimensions) +
                    " dimensions; 1 to 4 with a whole header are read");
  }
  std::vector<int64_t> shape;
  for (int64_t i = 0; i < dimensions; ++i) {
    shape.push_back(big_endian(head + 4 + 4 * i));
  }
  return array_in_file(std::move(file), offset, shape, at::kByte);
}

}  // namespace infinitybatch::app
