#pragma once

#include "offload/disk_file.hpp"

#include <ATen/core/TensorBody.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

namespace infinitybatch::offload {

struct StoreOptions {
  /// The arena on the host, pinned for accelerators. It is filled to its last 64 bytes before
  /// anything goes to disk.
  int64_t host_bytes = 0;
  /// Whether what the arena cannot hold may go to disk.
  bool disk = true;
  /// The most that may lie there.
  int64_t disk_bytes = std::numeric_limits<int64_t>::max();
  /// Where, and how.
  DiskFileOptions file{};
  /// On the CPU only: copies take at least their bytes divided by this, in bytes per second, as if
  /// there were a link to a device. 0: as fast as they go.
  double bandwidth = 0;
};

/// What a store has done since it was made.
struct StoreStatistics {
  int64_t host_bytes = 0;  ///< in the arena now, each storage rounded up to 64 bytes
  int64_t host_peak = 0;
  int64_t disk_bytes = 0;  ///< on disk now, each call's share rounded up to 4096 bytes
  int64_t disk_peak = 0;
  int64_t moved_out = 0;   ///< bytes of storages that left the device
  int64_t moved_back = 0;  ///< and that came back to it
  double seconds_copying = 0;
  double seconds_out = 0;     ///< of these, from the device
  double seconds_back = 0;    ///< and to it
  double seconds_waited = 0;  ///< of these, while the caller waited
  double seconds_hidden = 0;  ///< and while it did something else
};

/// Holders of a storage, besides what is given, for which the caller answers: they do not read or
/// write it until it is back.
enum class Others {
  none,     ///< a storage moves where the given handles alone hold it: no other tensor lies on it,
            ///< and no given tensor is held elsewhere (a parameter, an input, an autograd graph,
            ///< an object of Python's)
  handles,  ///< given tensors may be held elsewhere; other tensors on their storages keep these
  tensors,  ///< other tensors as well: what an autograd graph saved
};

/// What would become of tensors' memory, in bytes; each storage counts once.
struct Movable {
  int64_t moves = 0;
  int64_t held_by_others = 0;
  /// On the device, but not of its allocator's making (NumPy's, another process's, a mapped
  /// file's; on the CPU also what torch allocated before this library was loaded), or in a tensor
  /// that is more than memory (a subclass, a nested tensor).
  int64_t not_ours = 0;
  int64_t stays() const noexcept { return held_by_others + not_ours; }
};

struct MovableStorages;
namespace detail {
class StoreState;
class OffloadedState;
}  // namespace detail

/// Tensors whose memory is away, or on its way there or back. They keep identity, shapes, strides
/// and version counters; whoever reads them while their memory is away gets an error that says so.
///
/// Destroying it gives the place up: memory that is away then is gone, its tensors must never be
/// read again. It may outlive its store. Use it, and its store, in one thread at a time.
class Offloaded {
 public:
  Offloaded() noexcept;  ///< of nothing
  Offloaded(Offloaded&&) noexcept;
  Offloaded& operator=(Offloaded&&) noexcept;
  ~Offloaded();

  /// Bytes that move, and those that do not.
  const Movable& bytes() const noexcept { return bytes_; }
  /// Whether the tensors' memory is not theirs to use: from `put`, or `start_put`, on until
  /// `bring_back` has returned.
  bool away() const noexcept { return state_ != nullptr; }
  /// Whether `prefetch` has begun to bring it back.
  bool returning() const noexcept;

  /// Ends what `Store::start_put` began: waits for the copy, then frees the memory on the device,
  /// in the calling thread. Does nothing where nothing is leaving.
  /// \throws OffloadError where the disk failed: all tensors are as they were, nothing is away
  void finish_put();

  /// Allocates on the device and begins to copy back, in the background. Does nothing where nothing
  /// is away. Throws what `bring_back` throws, except for what the disk does.
  void prefetch();

  /// Allocates on the device unless `prefetch` has, copies or waits for the copy, gives the memory
  /// back to its storages and the place up. Storages that nobody holds any more are passed over.
  /// Does nothing where nothing is away.
  /// \throws c10::OutOfMemoryError where the device has no room, OffloadError where the disk does
  ///         not give the bytes back, StateError where a storage was resized meanwhile. The memory
  ///         is still away then, nothing is allocated, and it may be tried again.
  void bring_back();

 private:
  friend class Store;

  Movable bytes_;
  std::unique_ptr<detail::OffloadedState> state_;
};

/// Where tensors that must wait go: an arena on the host, and beyond it an anonymous file.
///
///     Store store(device, {.host_bytes = 1 << 30});
///     Offloaded frontier = store.put(tensors);         // their memory is free at once
///     ...
///     frontier.bring_back();                        // bit for bit what they were
///
/// With copies behind the device's work:
///
///     Offloaded frontier = store.start_put(tensors);
///     ...                                           // compute
///     frontier.finish_put();                        // their memory is free
///     ...
///     frontier.prefetch();                          // allocates
///     ...                                           // compute
///     frontier.bring_back();
class Store {
 public:
  /// Takes the arena and opens the file.
  /// \throws InvalidArgument, OffloadError
  explicit Store(c10::Device device, StoreOptions options = {});
  ~Store();
  Store(Store&&) noexcept;
  Store& operator=(Store&&) noexcept;

  /// Moves the memory of `tensors` away, each storage once however many of them lie on it.
  /// Undefined tensors, tensors without a storage and those of other devices are passed over.
  /// \param tensors the caller's own handles: a copy of them would count as another holder
  /// \throws OffloadError where arena and disk have no room, or the disk fails: all tensors are as
  ///         they were
  Offloaded put(at::ArrayRef<at::Tensor> tensors, Others others = Others::none);
  /// Moves storages, whoever holds them: the caller answers for all.
  Offloaded put(at::ArrayRef<c10::Storage> storages);

  /// The same, copying in the background: memory is freed by `Offloaded::finish_put`. Until then
  /// the tensors may be read, but not written. On accelerators the copy waits for what the current
  /// stream was given before, and nothing else.
  /// \throws OffloadError where there is no room; what the disk does is thrown by `finish_put`
  Offloaded start_put(at::ArrayRef<at::Tensor> tensors, Others others = Others::none);
  Offloaded start_put(at::ArrayRef<c10::Storage> storages);

  /// What `put` would do with `tensors` if there were room.
  Movable movable(at::ArrayRef<at::Tensor> tensors, Others others = Others::none) const;

  /// Bytes of the arena, and on disk, that moving storages of these sizes in one call takes.
  struct Need {
    int64_t host = 0;
    int64_t disk = 0;
  };
  /// \param host_free bytes of the arena that are free
  static Need need(at::ArrayRef<int64_t> storages, int64_t host_free);

  StoreStatistics statistics() const;
  c10::Device device() const noexcept;
  const StoreOptions& options() const noexcept;
  /// The file, null where the options leave disk out.
  const DiskFile* file() const noexcept;

 private:
  Offloaded start(MovableStorages movable, bool in_background);

  std::shared_ptr<detail::StoreState> state_;
};

}  // namespace infinitybatch::offload
