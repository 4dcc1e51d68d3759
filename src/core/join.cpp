#include "core/join.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>

#include <sstream>

namespace infinitybatch {

at::Tensor join_rows(const std::vector<at::Tensor>& parts, int64_t dim, const std::string& name) {
  for (const at::Tensor& part : parts) {
    std::vector<int64_t> sizes = part.sizes().vec();
    sizes[static_cast<size_t>(dim)] = parts.front().size(dim);
    if (parts.front().sizes() == sizes) continue;
    std::ostringstream text;
    text << name << " has shape " << parts.front().sizes() << " for one micro-batch and "
         << part.sizes()
         << " for another, so they cannot be joined: what one sample gives depends on those beside "
            "it (padding to the longest?); make it the same for every micro-batch "
            "(pad_packed_sequence takes total_length=)";
    throw BatchError(text.str());
  }
  return at::cat(parts, dim);
}

void refuse_sparse(const Batch& outputs) {
  for (size_t i = 0; i < outputs.leaves().size(); ++i) {
    const at::Tensor& tensor = outputs.leaves()[i].tensor;
    if (!tensor.defined() || tensor.layout() == at::kStrided) continue;
    throw Unsupported("outputs" + outputs.structure()->leaf_name(i) +
                      " is sparse, and cannot be joined from micro-batches; return it dense "
                      "(to_dense()), and make it sparse behind the model");
  }
}

}  // namespace infinitybatch
