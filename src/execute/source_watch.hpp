#pragma once

#include "core/row_range.hpp"

#include <infinitybatch/core/batch.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>

namespace infinitybatch {

/// Notices a source that gives other rows when it is asked for the same ones again (augmentation
/// that draws anew): a second forward or a replay of them would belong to another loss. Compares
/// numbers that are computed from their bits, of more than 256 KiB from parts spread over them;
/// tensors that the source puts on an accelerator are not looked at.
class SourceWatch {
 public:
  /// \param given as the source gave them
  /// \throws BatchError naming the rows
  void meet(Rows rows, const Batch& given);

 private:
  std::map<std::pair<int64_t, int64_t>, size_t> seen_;
};

}  // namespace infinitybatch
