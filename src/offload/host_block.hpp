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
/// On the CPU it is one anonymous mapping. For an accelerator it is pinned, by torch's host
/// allocator for that device: in chunks of powers of two, because that allocator rounds up to them.
class HostBlock {
 public:
  static constexpr int64_t kPage = 4096;  ///< chunks begin at multiples of it, and have them

  /// \param bytes  rounded up to whole pages; 0 takes nothing
  /// \throws OffloadError where the system refuses the memory
  HostBlock(int64_t bytes, c10::Device device);
  ~HostBlock();
  HostBlock(const HostBlock&) = delete;
  HostBlock& operator=(const HostBlock&) = delete;

  int64_t bytes() const noexcept { return bytes_; }
  /// The bytes from `begin` on, `most` of them or as many as lie in one piece.
  std::span<std::byte> piece(int64_t begin, int64_t most) const;

 private:
  struct Chunk {
    int64_t begin;
    int64_t bytes;
    std::byte* data;
    c10::DataPtr pinned;  // empty on the CPU
  };

  void pin(int64_t bytes, c10::Device device);

  int64_t bytes_ = 0;
  std::vector<Chunk> chunks_;
};

}  // namespace infinitybatch::offload
