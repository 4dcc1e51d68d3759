#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

namespace infinitybatch::tape {

/// The state of the thread and of torch's switches that decides what an op does: grad and inference
/// mode, autocast, the dispatcher's included and excluded keys, the choice of kernels
/// (`sdpa_kernel`, cuDNN, oneDNN, determinism). It may change in the middle of a forward, so each
/// op of a tape has its own. Streams are not part of it: see Recorder.
struct Modes {
  c10::DispatchKeySet included;
  c10::DispatchKeySet excluded;
  bool grad_mode = false;
  bool inference_mode = false;
  bool forward_grad_mode = false;
  bool view_replay = false;
  bool autocast_cache = false;
  bool in_autocast = false;  ///< in a region of it, be it one that switches it off
  c10::ScalarType autocast_on_cpu = c10::ScalarType::Undefined;
  c10::ScalarType autocast_on_accelerator = c10::ScalarType::Undefined;
  c10::ScalarType default_type = c10::ScalarType::Undefined;
  uint32_t switches = 0;  ///< of at::Context, one bit each; see modes.cpp

  bool operator==(const Modes& other) const;

  static Modes current();
  /// Makes them current. Switches of at::Context belong to the process, not to the thread.
  void apply() const;

  /// Whether a Python dispatch mode or a functorch transform sees ops before they run.
  bool intercepted() const;
};

/// Puts the modes back that it found.
class ModesGuard {
 public:
  ModesGuard() : before_(Modes::current()) {}
  ~ModesGuard() { before_.apply(); }
  ModesGuard(const ModesGuard&) = delete;
  ModesGuard& operator=(const ModesGuard&) = delete;
  const Modes& before() const noexcept { return before_; }

 private:
  Modes before_;
};

}  // namespace infinitybatch::tape
