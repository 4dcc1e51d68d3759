#include "data/array.hpp"

#include "errors.hpp"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <string>
#include <utility>

namespace infinitybatch::app {

int64_t checked_bytes(const MappedFile& file, const std::vector<int64_t>& shape,
                      int64_t item_bytes) {
  int64_t bytes = item_bytes;
  for (int64_t size : shape) {
    if (size < 0 || __builtin_mul_overflow(bytes, size, &bytes)) {
      throw DataError(file.path() + ": the header's shape is impossible (size " +
                      std::to_string(size) + "); the file is damaged, write it again");
    }
  }
  return bytes;
}

void check_length(const MappedFile& file, int64_t offset, int64_t expected) {
  const int64_t found = file.size() - offset;
  if (found == expected) return;
  throw DataError(file.path() + ": holds " + std::to_string(found) +
                  " bytes of data where its header promises " + std::to_string(expected) +
                  "; the file is damaged or incomplete, write it again");
}

at::Tensor array_in_file(std::shared_ptr<const MappedFile> file, int64_t offset,
                         const std::vector<int64_t>& shape, at::ScalarType type,
                         bool fortran_order) {
  const auto item_bytes = static_cast<int64_t>(c10::elementSize(type));
  const int64_t expected = checked_bytes(*file, shape, item_bytes);
  check_length(*file, offset, expected);
  if (offset % item_bytes != 0) {
    throw DataError(file->path() + ": its data begins at byte " + std::to_string(offset) +
                    ", not aligned to elements of " + std::to_string(item_bytes) +
                    " bytes; write it again with numpy.save");
  }
  void* data = const_cast<uint8_t*>(file->data() + offset);
  auto keep = [file = std::move(file)](void*) {};
  std::vector<int64_t> strides(shape.size());
  int64_t stride = 1;
  for (size_t i = 0; i < shape.size(); ++i) {
    const size_t dimension = fortran_order ? i : shape.size() - 1 - i;
    strides[dimension] = stride;
    stride *= std::max<int64_t>(shape[dimension], 1);
  }
  return at::from_blob(data, shape, strides, std::move(keep), at::TensorOptions().dtype(type));
}

}  // namespace infinitybatch::app
