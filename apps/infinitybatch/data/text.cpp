#include "data/text.hpp"

#include <ATen/Functions.h>

#include <algorithm>
#include <cmath>

#include "data/array.hpp"
#include "data/mapped_file.hpp"
#include "errors.hpp"

namespace infinitybatch::app {
namespace {

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
  dataset.train = windows(bytes, 0, count - held, context);
  dataset.held_out = windows(bytes, count - held, held, context);
  return dataset;
}

}  // namespace infinitybatch::app
