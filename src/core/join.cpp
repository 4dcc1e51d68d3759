#include "core/join.hpp"

#include "core/sample_rows.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>

#include <sstream>

namespace infinitybatch {

at::Tensor join_rows(const std::vector<at::Tensor>& parts, const Leaf& like,
                     const std::string& name) {
  const int64_t dim = like.batch_dim;
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
  if (like.places == 1 || !like.interleaved) return at::cat(parts, dim);
  std::vector<at::Tensor> apart;
  for (const at::Tensor& part : parts) apart.push_back(with_samples_apart(part, like));
  return at::cat(apart, sample_dim(like)).flatten(dim, dim + 1);
}

int64_t places_of(const std::vector<at::Tensor>& parts, const std::vector<int64_t>& row_counts,
                  const std::string& name) {
  const int64_t places = parts.front().size(0) / row_counts.front();
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].size(0) == places * row_counts[i]) continue;
    std::ostringstream text;
    text << name << " has shape " << parts.front().sizes() << " for " << row_counts.front()
         << " samples and " << parts[i].sizes() << " for " << row_counts[i]
         << ", so they cannot be joined: pad samples to the same length for every micro-batch";
    throw BatchError(text.str());
  }
  return places;
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
