#pragma once

#include <infinitybatch/core/batch.hpp>

#include <cstddef>
#include <vector>

namespace infinitybatch {

/// Which leaves of a model's outputs share memory, as the micro-batches tell. Joined over all
/// micro-batches they do not any more, which matters where the loss writes one of them.
class SharedOutputs {
 public:
  /// \param sure false: a single row of several, where copies that the whole batch makes
  ///             (`contiguous`) can be the tensor itself
  void meet(const Batch& outputs, bool sure);

  /// The first leaf that is the same tensor in every micro-batch; mostly itself.
  size_t first_of(size_t leaf) const { return leaf < first_.size() ? first_[leaf] : leaf; }

  /// Whether another leaf, which is not the same tensor, has elements in the same memory.
  bool overlaps(size_t leaf) const;

 private:
  std::vector<size_t> first_;
  std::vector<bool> overlaps_;  // in micro-batches that are sure
  std::vector<bool> may_overlap_;
  bool sure_ = false;
};

}  // namespace infinitybatch
