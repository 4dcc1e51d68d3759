#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace infinitybatch::offload {

/// Memory of the host that copies of a device's tensors lie in. Torch's CPU allocator does not see
/// it, so no memory budget does: on the CPU, where a simulated device shares the host's memory,
/// copies are counted apart.
///
/// On the CPU it is one anonymous mapping, which the system fills as it is written. For an
/// accelerator it is pinned, by torch's host allocator for that device: in chunks of powers of two,
/// because that allocator rounds up to them, and each when it is first needed, because pinning
/// takes its time and what is pinned is lost to everybody else.
class HostBlock {
 public:
  static constexpr int64_t kPage = 4096;  ///< chunks begin at multiples of it, and have them

  /// \param bytes  the most there may be, rounded up to whole pages
  /// \throws OffloadError where the system refuses the address space
  HostBlock(int64_t bytes, c10::Device device);
  ~HostBlock();
  HostBlock(const HostBlock&) = delete;
  HostBlock& operator=(const HostBlock&) = delete;

  int64_t bytes() const noexcept { return bytes_; }
  /// From here on the first `end` bytes may be used. Pieces of what was there before may be looked
  /// up in other threads meanwhile.
  /// \throws OffloadError where the system refuses the memory
  void provide(int64_t end);
  /// The bytes from `begin` on, `most` of them or as many as lie in one piece, of those provided.
  std::span<std::byte> piece(int64_t begin, int64_t most) const;

 private:
  struct Chunk {
    int64_t begin;
    int64_t bytes;
    std::byte* data;      // null until it is provided
    c10::DataPtr pinned;  // empty on the CPU
  };

  c10::Device device_;
  int64_t bytes_ = 0;
  std::vector<Chunk> chunks_;
  size_t provided_ = 0;  // of them
};

}  // namespace infinitybatch::offload
