#include "core/batch_form.hpp"

#include <utility>
#include <vector>

namespace infinitybatch {

Batch without_tensors(const Batch& batch) {
  std::vector<Leaf> leaves = batch.leaves();
  for (Leaf& leaf : leaves) leaf.tensor.reset();
  return {std::move(leaves), batch.structure()};
}

Batch without_graph(const Batch& batch) {
  std::vector<Leaf> leaves = batch.leaves();
  for (Leaf& leaf : leaves) {
    if (leaf.tensor.defined()) leaf.tensor = leaf.tensor.detach();
  }
  return {std::move(leaves), batch.structure()};
}

}  // namespace infinitybatch
