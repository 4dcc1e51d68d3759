#pragma once

#include "tape/tape.hpp"

#include <c10/core/StorageImpl.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>
#include <c10/util/intrusive_ptr.h>

#include <deque>
#include <memory_resource>
#include <utility>
#include <vector>

namespace infinitybatch::tape {

template <typename Key, typename Value>
using HashMap = ska::flat_hash_map<Key, Value, std::hash<Key>, std::equal_to<Key>,
                                   std::pmr::polymorphic_allocator<std::pair<Key, Value>>>;

/// A piece of memory that a recording has met.
struct Memory {
  explicit Memory(c10::weak_intrusive_ptr<c10::StorageImpl> of) : storage(std::move(of)) {}

  c10::weak_intrusive_ptr<c10::StorageImpl> storage;  ///< keeps the address from being used again
  c10::SmallVector<ValueId, 4> values;                ///< tensors that lie in it
  bool made_here = false;                             ///< by an op of this recording
  bool from_empty = false;                            ///< by an op that leaves it uninitialised
  bool raw = false;                                   ///< and no op has written it yet
  bool scaled = false;     ///< rows of it, by `embedding_renorm_`: its version tells nothing
  int64_t restored = -1;   ///< index into Tape::restores of what it was found to hold last
  bool resizable = false;  ///< when it was made; `numpy()` takes that away
  int64_t bytes = 0;       ///< when it was met
};

/// Which memory the ops of a recording made, and which tensors lie in it.
class Memories {
 public:
  explicit Memories(std::pmr::memory_resource* resource) : all_(resource), memories_(resource) {}

  void reserve(size_t count) { memories_.reserve(count); }
  /// Of `tensor`; null where it has none (sparse) or it is not known.
  Memory* find(const at::Tensor& tensor);
  /// Of `tensor`, now known; null where it has none.
  Memory* add(const at::Tensor& tensor);
  /// Whether an unknown storage lies in memory that was made here (NumPy, DLPack).
  bool inside_another(const at::Tensor& tensor) const;
  /// Gives all values that lie in the same memory the same number.
  /// \param bytes of each number
  void number(std::vector<uint32_t>& numbers, std::vector<int64_t>& bytes) const;
  /// Whether NumPy has got hold of memory that was made here.
  static bool exported(const Memory& memory, const at::Tensor& tensor);

 private:
  std::pmr::deque<Memory> all_;  // in the order in which they were met; they stay where they are
  HashMap<const c10::StorageImpl*, Memory*> memories_;
};

/// All of the memory that `tensor` lies in, as a tensor of bytes with a version of its own.
at::Tensor bytes_of(const at::Tensor& tensor);

}  // namespace infinitybatch::tape
