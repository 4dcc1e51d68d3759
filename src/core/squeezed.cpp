#include "core/squeezed.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/core/TensorBody.h>
#include <c10/util/StringUtil.h>

namespace infinitybatch {

void refuse_squeezed(const std::vector<Batch>& parts, const std::vector<int64_t>& row_counts,
                     std::string_view name) {
  const Batch& first = parts.front();
  for (size_t i = 1; i < parts.size(); ++i) {
    if (row_counts[i] != 1 || row_counts.front() < 2) continue;
    for (size_t leaf = 0; leaf < first.leaves().size(); ++leaf) {
      if (leaf >= parts[i].leaves().size()) break;
      const at::Tensor& whole = first.leaves()[leaf].tensor;
      const at::Tensor& part = parts[i].leaves()[leaf].tensor;
      if (!whole.defined() || !part.defined() || part.dim() >= whole.dim()) continue;
      throw BatchError(c10::str(name, first.structure()->leaf_name(leaf), " has shape ",
                                whole.sizes(), " for ", row_counts.front(), " rows and ",
                                part.sizes(), " for one: ", kSqueezed));
    }
  }
}

}  // namespace infinitybatch
