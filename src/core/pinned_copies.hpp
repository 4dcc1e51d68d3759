#pragma once

#include <infinitybatch/core/batch_source.hpp>

#include <c10/core/Device.h>

namespace infinitybatch {

/// Copies out of pinned memory, which go on after the call that started them has returned. Nobody
/// asked for that: the owner of the memory may write to it as soon as a step returns, and a source
/// that has one staging buffer as soon as it is asked again.
class PinnedCopies {
 public:
  PinnedCopies() = default;
  /// Waits for what this thread has started. A step holds one for as long as it runs.
  ~PinnedCopies();
  PinnedCopies(const PinnedCopies&) = delete;
  PinnedCopies& operator=(const PinnedCopies&) = delete;

  /// A copy to `device` has just been given to this thread's current stream.
  static void started(c10::Device device);
  /// Waits until this thread's copies are over: for them, not for what was computed since.
  static void wait();
};

/// Whether rows that the source gave stay as they are: parts of tensors that their owner keeps. Of
/// any other source nobody knows.
bool keeps_rows(const BatchSource& source);

}  // namespace infinitybatch
