#include "core/extent.hpp"

namespace infinitybatch {

std::pair<int64_t, int64_t> extent_of(const at::Tensor& tensor) {
  const int64_t size = static_cast<int64_t>(tensor.element_size());
  const int64_t begin = tensor.storage_offset() * size;
  int64_t end = begin + (tensor.numel() > 0 ? size : 0);
  for (int64_t d = 0; d < tensor.dim() && tensor.numel() > 0; ++d) {
    end += (tensor.size(d) - 1) * tensor.stride(d) * size;
  }
  return {begin, end};
}

}  // namespace infinitybatch
