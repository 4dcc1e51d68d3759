#include "data/text.hpp"

#include "data/array.hpp"
#include "data/mapped_file.hpp"
#include "errors.hpp"

#include <ATen/Functions.h>

#include <algorithm>
#include <cmath>

namespace infinitybatch::app {
namespace {

constexpr int64_t kLookedAt = 64 * 1024;

/// Where a text would not go on: the first byte that is none of text, or -1. Text has no byte 0 and
/// hardly any control characters, in whatever encoding that keeps ASCII.
int64_t first_binary_byte(const uint8_t* bytes, int64_t length) {
  int64_t first = -1;
  int64_t controls = 0;
  const int64_t end = std::min(length, kLookedAt);
  for (int64_t i = 0; i < end; ++i) {
    const uint8_t byte = bytes[i];
    if (byte == 0) return i;
    const bool is_blank = (byte >= '\t' && byte <= '\r') || byte == 0x1B;
    if ((byte < ' ' && !is_blank) || byte == 0x7F) {
      first = first < 0 ? i : first;
      ++controls;
    }
  }
  return controls * 50 > end ? first : -1;
}

void check_is_text(const std::string& path, const MappedFile& file) {
  const int64_t at = first_binary_byte(file.data(), file.size());
  if (at < 0) {
    return;
  }
  throw DataError(path + " is not text: byte " + std::to_string(at) + " is " +
                  std::to_string(file.data()[at]) +
                  "; --data takes a folder of IDX files or of images, a .csv, .npz, .npy, IDX or "
                  "text file (UTF-16 by way of: iconv -f UTF-16 -t UTF-8)");
}

Split windows(const at::Tensor& bytes, int64_t first, int64_t count, int64_t context) {
  const auto rows = [=](int64_t shift) {
    const at::Tensor part =
        bytes.slice(0, first * context + shift, (first + count) * context + shift)
            .view({count, context});
    return
        [part](const at::Tensor& indices) { return part.index_select(0, indices).to(at::kLong); };
  };
  Split split;
  split.size = count;
  if (count > 0) {
    split.inputs = rows(0);
    split.targets = rows(1);
  }
  return split;
}

}  // namespace

Dataset read_text(const std::string& path, int64_t context, double held_out) {
  auto file = MappedFile::open(path);
  check_is_text(path, *file);
  const int64_t length = file->size();
  const int64_t count = (length - 1) / context;
  if (count < 2) {
    throw DataError(path + ": has " + std::to_string(length) +
                    " bytes, too few for two samples of " + std::to_string(context) +
                    "; choose a longer text or a smaller --context");
  }
  // At least one window stays on each side, unless nothing is to be held out.
  auto held = static_cast<int64_t>(std::llround(static_cast<double>(count) * held_out));
  held = held_out == 0 ? 0 : std::clamp<int64_t>(held, 1, count - 1);
  const at::Tensor bytes = array_in_file(std::move(file), 0, {length}, at::kByte);
  Dataset dataset;
  dataset.name = path;
  dataset.kind = SampleKind::text;
  dataset.sample_shape = {context};
  dataset.classes = 256;
  dataset.encoding.format = "text";
  dataset.train = windows(bytes, 0, count - held, context);
  dataset.held_out = windows(bytes, count - held, held, context);
  return dataset;
}

}  // namespace infinitybatch::app
