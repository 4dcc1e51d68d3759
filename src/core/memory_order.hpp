#pragma once

#include <infinitybatch/core/batch.hpp>

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <string>
#include <vector>

namespace infinitybatch {

/// Dimensions from the outermost in memory to the innermost, as torch orders those of a result that
/// lies like its argument: dimensions that are expanded (of stride 0) keep their place.
std::vector<int64_t> memory_order(c10::IntArrayRef sizes, c10::IntArrayRef strides);

/// In which order the elements of a tensor lie, whatever the size of `dim` (-1: of none), as text;
/// empty where they lie in the order of dimensions, without holes.
std::string layout_of(const at::Tensor& tensor, int64_t dim);
/// That of all leaves. Two batches that differ in it alone draw other random numbers for the same
/// samples, for torch fills what it draws "like" a tensor in that tensor's order.
std::string layouts_of(const Batch& batch);

}  // namespace infinitybatch
