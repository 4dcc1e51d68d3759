#include "data/array.hpp"

#include <ATen/ops/from_blob.h>

#include <string>
#include <utility>

#include "errors.hpp"

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

at::Tensor array_in_file(std::shared_ptr<const MappedFile> file, int64_t offset,
                         const std::vector<int64_t>& shape, at::ScalarType type) {
  const auto item_bytes = static_cast<int64_t>(c10::elementSize(type));
  const int64_t expected = checked_bytes(*file, shape, item_bytes);
  const int64_t found = file->size() - offset;
  if (found != expected) {
    throw DataError(file->path() + ": holds " + std::to_string(found) +
                    " bytes of data where its header promises " + std::to_string(expected) +
                    "; the file is damaged or incomplete, write it again");
  }
  if (offset % item_bytes != 0) {
    throw DataError(file->path() + ": its data begins at byte " + std::to_string(offset) +
                    ", not aligned to elements of " + std::to_string(item_bytes) +
                    " bytes; write it again with numpy.save");
  }
  void* data = const_cast<uint8_t*>(file->data() + offset);
  auto keep = [file = std::move(file)](void*) {};
  return at::from_blob(data, shape, std::move(keep), at::TensorOptions().dtype(type));
}

}  // namespace infinitybatch::app
