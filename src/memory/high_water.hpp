#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>

namespace infinitybatch::memory {

/// The peak of live bytes on `device` between construction and now, like PeakScope, for stretches
/// that begin in one call and end in another: objects may overlap in any order and may be destroyed
/// in any thread. On the CPU only allocations of the thread that made it raise the peak; asked from
/// another thread it says what it knew last. On accelerators whatever happens on the device counts:
/// backward runs in the device's own thread.
class HighWater {
 public:
  /// \throws StateError on the CPU where torch does not use this library's allocator
  explicit HighWater(c10::Device device);
  ~HighWater();
  HighWater(const HighWater&) = delete;
  HighWater& operator=(const HighWater&) = delete;

  int64_t peak() const;

  class Pause;

 private:
  struct Mark;
  std::shared_ptr<Mark> mark_;
};

/// While it lives, what happens raises no peak: what a step does once is no part of its plan. Where
/// all is counted on the device (see above) it changes nothing.
class HighWater::Pause {
 public:
  /// \param paused may be null: then nothing pauses. Made in this thread, and outlives this
  explicit Pause(const HighWater* paused);
  ~Pause();
  Pause(const Pause&) = delete;
  Pause& operator=(const Pause&) = delete;

 private:
  std::shared_ptr<Mark> mark_;
};

}  // namespace infinitybatch::memory
