#include <infinitybatch/execute/source_watch.hpp>

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

size_t hash_of(const Batch& batch) {
  size_t hash = 0;
  for (const at::Tensor& tensor : batch.tensors()) {
    if (!tensor.device().is_cpu() || tensor.layout() != at::kStrided) continue;
    // A copy would be memory that no plan knows of.
    if (!tensor.is_non_overlapping_and_dense()) continue;
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
