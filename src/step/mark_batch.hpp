#pragma once

#include <infinitybatch/core/batch.hpp>
#include <infinitybatch/step/batch_dim.hpp>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace infinitybatch {

/// How many samples there are, and how many steps of time each has, as the first tensor tells.
struct Extent {
  int64_t samples = 0;
  int64_t places = 1;
};

/// Inputs with their samples along the dimensions that `given` says, where they are not marked
/// themselves. One number is for every tensor of which that dimension has the size of the first
/// tensor's; a tensor of one dimension may have it there; one that has it nowhere is shared.
/// \param depth how many levels lie above the arguments: 1 in (positional, keywords)
/// \throws BatchError naming a tensor of which that is not clear, and how to mark it; where no
/// tensor has that dimension
Batch mark_inputs(Batch inputs, const BatchDim& given, size_t depth = 0);

/// Of inputs that are marked. Without any sample: 0.
Extent extent_of(const Batch& inputs);

/// Likewise targets beside such inputs, each of which has samples: what is several times as long
/// as there are samples is [time, batch] flattened.
/// \param whole for a loss that sees them whole: what is not clear is shared
Batch mark_targets(Batch targets, const BatchDim& given, const Extent& inputs, bool whole);

/// The keys that lead to a leaf, from the outermost: names and positions; "0" to a single tensor.
std::vector<std::string> path_of(const Batch& batch, size_t leaf);

/// Rows of a source, which is asked for so many. One number is for every tensor that has that
/// dimension.
/// \throws BatchError where none of the inputs has it
Batch mark_rows(Batch rows, const BatchDim& given, std::string_view name);

}  // namespace infinitybatch
