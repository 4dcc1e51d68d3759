#pragma once

#include "execute/recorded.hpp"

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace infinitybatch {

/// With `static_graph`: recordings of one kind of batch that later micro-batches and steps reuse,
/// by the number of rows.
struct StaticTapes {
  struct Entry {
    std::shared_ptr<const Recorded> recorded;
    bool confirmed = false;  ///< another micro-batch gave the same program
  };
  std::map<int64_t, Entry> by_rows;
  std::vector<const void*> owned;  ///< parameters and buffers that they were recorded with
  /// Values decide what forward does, or may: each micro-batch is recorded. Copies share it.
  std::shared_ptr<std::atomic<bool>> varies = std::make_shared<std::atomic<bool>>(false);

  /// A confirmed recording of so many rows; null where there is none.
  std::shared_ptr<const Recorded> confirmed(int64_t rows) const;
  /// Keeps the first recording of so many rows; a second one confirms it.
  /// \throws Unsupported where the two are different programs
  void meet(int64_t rows, const Recorded& recorded);
  /// Values decide what forward does: nothing recorded so far is used again.
  void distrust();
};

}  // namespace infinitybatch
