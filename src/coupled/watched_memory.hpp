#pragma once

#include "tape/op_facts.hpp"

#include <ATen/core/TensorBody.h>
#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include <cstddef>
#include <optional>
#include <vector>

namespace infinitybatch::tape {
class SeenOp;
}

namespace infinitybatch::coupled {

/// Sees which of a few tensors the ops of a forward pass write into (parameters), or read (state
/// that a module carries from call to call). Whoever lies in the same storage is meant too, so that
/// writes through `.data`, which raise no version, are seen.
class WatchedMemory {
 public:
  struct Known {
    at::Tensor tensor;
    at::Tensor memory;      ///< an alias of it, which keeps its storage
    at::Tensor before;      ///< its values in front of the first write; undefined without one
    bool carried = false;   ///< state, whose reads matter too
    bool written = false;   ///< since the last `rest`
    bool read = false;      ///< the values that it had at the last `rest`
    bool renewed = false;   ///< none of these values is left
    bool rescaled = false;  ///< an embedding's `max_norm` writes into it, which others see to
  };

  /// So many tensors will be told.
  void expect(size_t count) {
    known_.reserve(count);
    at_.reserve(count);
  }
  /// \param carried may be forgotten again; tell it after everything that may not
  void know(const at::Tensor& tensor, bool carried);
  void forget_carried();
  /// Nobody need see what an embedding's `max_norm` does to `tensor`.
  void leave_rescaled(const at::Tensor& tensor);

  /// Whether an op of these facts can be of interest: most are not, and are asked for in each
  /// forward.
  bool minds(const tape::OpFacts* facts) const noexcept {
    return facts != nullptr && (facts->writes || any_carried_);
  }
  /// An op is about to run.
  void observe(const tape::SeenOp& op);
  /// Nothing was written or read until now. What tensors held before their first write is kept.
  void rest();
  /// Nothing will be undone, nor looked at, any more.
  void let_go() {
    known_.clear();
    at_.clear();
  }

  /// Where it stands for as long as it is known; nothing for one without storage. It still lies in
  /// the memory in which it was told.
  std::optional<size_t> find(const at::Tensor& tensor) const;
  const Known& operator[](size_t place) const { return known_[place]; }
  /// Puts back what was written into, past the version counter. Who was given other memory
  /// meanwhile (`.data = …`) keeps it.
  void undo() const;

 private:
  void on_tensor(const at::Tensor& tensor, bool writes, bool reads, bool covers);
  void on_value(const c10::IValue& value, bool writes, bool reads, bool covers);

  std::vector<Known> known_;
  using Places = c10::SmallVector<size_t, 2>;
  ska::flat_hash_map<const c10::StorageImpl*, Places> at_;  // in known_
  bool any_carried_ = false;
};

}  // namespace infinitybatch::coupled
