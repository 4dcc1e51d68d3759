#include "execute/source_watch.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/core/Tensor.h>
#include <c10/util/hash.h>

#include <functional>
#include <string>
#include <string_view>

namespace infinitybatch {
namespace {

/// Of a large tensor parts that are spread evenly over it: what draws anew changes nearly all.
size_t hash_of(std::string_view bytes) {
  constexpr size_t kPart = 4096;
  constexpr size_t kParts = 64;
  const std::hash<std::string_view> hash_part;
  if (bytes.size() <= kPart * kParts) return hash_part(bytes);
  size_t hash = 0;
  for (size_t part = 0; part < kParts; ++part) {
    const size_t begin = (bytes.size() - kPart) / (kParts - 1) * part;
    hash = c10::hash_combine(hash, hash_part(bytes.substr(begin, kPart)));
  }
  return hash;
}

/// Of elements that do not lie side by side, so many of them that are spread evenly: a copy would
/// be memory that no plan knows of.
size_t hash_of_strided(const at::Tensor& tensor) {
  constexpr int64_t kMost = int64_t{1} << 16;
  const auto* const first = static_cast<const char*>(tensor.const_data_ptr());
  const auto size = static_cast<int64_t>(tensor.element_size());
  // Odd, so that it does not walk along one column.
  const int64_t step = tensor.numel() <= kMost ? 1 : tensor.numel() / kMost | 1;
  size_t hash = 0;
  for (int64_t i = 0; i < tensor.numel(); i += step) {
    int64_t place = 0;
    int64_t rest = i;
    for (int64_t dim = tensor.dim(); dim-- > 0;) {
      place += rest % tensor.size(dim) * tensor.stride(dim);
      rest /= tensor.size(dim);
    }
    const std::string_view element(first + place * size, static_cast<size_t>(size));
    hash = c10::hash_combine(hash, std::hash<std::string_view>()(element));
  }
  return hash;
}

size_t hash_of(const Batch& batch) {
  size_t hash = 0;
  for (const at::Tensor& tensor : batch.tensors()) {
    if (!tensor.device().is_cpu() || tensor.layout() != at::kStrided) continue;
    if (!tensor.is_non_overlapping_and_dense()) {
      hash = c10::hash_combine(hash, hash_of_strided(tensor));
      continue;
    }
    const std::string_view bytes(static_cast<const char*>(tensor.const_data_ptr()),
                                 tensor.nbytes());
    hash = c10::hash_combine(hash, hash_of(bytes));
  }
  return hash;
}

}  // namespace

void SourceWatch::meet(Rows rows, const Batch& given) {
  const size_t hash = hash_of(given);
  const auto [known, anew] = seen_.try_emplace({rows.begin, rows.end}, hash);
  if (anew || known->second == hash) return;
  throw BatchError("the source of the inputs gave other values for samples " +
                   std::to_string(rows.begin) + " to " + std::to_string(rows.end - 1) +
                   " when it was asked for them again, as a loss of all samples, and layers that "
                   "see them all, need it: make what it draws (augmentation) depend on the "
                   "sample's number alone, or draw it before the step");
}

}  // namespace infinitybatch
