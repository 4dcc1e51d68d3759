#pragma once

#include "coupled/watched_memory.hpp"

#include <infinitybatch/core/model.hpp>

#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <mutex>
#include <vector>

namespace infinitybatch {

/// Lets forward run at another point than the one where the parameters stand. Samples that are
/// computed apart are so for any parameters; samples that are combined behind a factor that is zero
/// (a gate, a projection that begins at zero) are seen to be at another point only.
///
/// While it is on, parameters that are trained and buffers that forward writes hold other values:
/// each number is moved by some sixteenth of its size, zeros become numbers of the size that a
/// fresh layer has, and tensors of tiny numbers are scaled up. Where which value goes is a formula
/// of its place, and no draw. The step between both is its own inverse (bits are exchanged), so no
/// copy is needed, and `off` gives every bit back. No version counter moves, and no op runs on the
/// CPU. Frozen parameters, and tensors whose memory torch does not own plainly, stay as they are.
/// One look at a time moves anything: two that met on the same memory would not undo each other.
class MovedValues {
 public:
  /// \param buffers which forward writes
  /// \param memory  sees writes into parameters: those that forward has rewritten stay; copies that
  ///                it makes meanwhile are moved back too. Must outlive this
  MovedValues(const std::vector<NamedParameter>& parameters, const std::vector<at::Tensor>& buffers,
              const coupled::WatchedMemory& memory);
  ~MovedValues();
  MovedValues(const MovedValues&) = delete;
  MovedValues& operator=(const MovedValues&) = delete;

  class Nudge;

  /// Nothing where somebody else has moved values.
  void on();
  void off();
  bool is_on() const noexcept { return on_; }
  /// Nothing is trained.
  bool empty() const noexcept { return values_.empty(); }

 private:
  struct Values {
    at::Tensor flat;     // every number once, past the version counter
    int scale = 0;       // by which power of two tiny numbers are scaled up
    int size = 0;        // the power of two of what stands for zero
    bool sign = true;    // whether that may be negative
    bool known = false;  // to `memory_`, at `place`
    size_t place = 0;
  };
  void add(const at::Tensor& tensor, bool parameter);
  void move(const Values& values, const at::Tensor& flat, bool there) const;
  /// Undone by the same again.
  void nudge(const Values& values, uint32_t which) const;
  /// A copy that was made meanwhile, in front of a write that is undone.
  void renew_copy(const Values& values) const;

  const coupled::WatchedMemory& memory_;
  std::vector<Values> values_;
  std::unique_lock<std::mutex> alone_;
  size_t moved_ = 0;  // of `values_`
  bool on_ = false;
};

/// While it lives, the last bit of some numbers is another, as if they had been rounded otherwise:
/// under autocast the last that its types keep. Whole numbers stay, see `turn_last_bits`. `on` and
/// `off` may not be called meanwhile.
class MovedValues::Nudge {
 public:
  /// \param which another number, other places
  Nudge(MovedValues& values, uint32_t which);
  ~Nudge();
  Nudge(const Nudge&) = delete;
  Nudge& operator=(const Nudge&) = delete;

 private:
  MovedValues& values_;
  uint32_t which_;
  std::unique_lock<std::mutex> alone_;
  size_t nudged_ = 0;
};

}  // namespace infinitybatch
