#include "execute/copied_batch.hpp"

#include <ATen/Functions.h>

#include <utility>
#include <vector>

namespace infinitybatch {

Batch copied(const Batch& batch) {
  std::vector<Leaf> leaves = batch.leaves();
  for (Leaf& leaf : leaves) {
    if (leaf.tensor.defined()) leaf.tensor = leaf.tensor.clone();
  }
  return {std::move(leaves), batch.structure()};
}

}  // namespace infinitybatch
