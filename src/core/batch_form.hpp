#pragma once

#include <infinitybatch/core/batch.hpp>

namespace infinitybatch {

/// What the leaves of a batch are, and where their samples lie, without the tensors.
Batch without_tensors(const Batch& batch);

/// The same tensors, without the graph that made them.
Batch without_graph(const Batch& batch);

}  // namespace infinitybatch
