#pragma once

#include "offload/device_link.hpp"
#include "offload/disk_file.hpp"
#include "offload/extents.hpp"
#include "offload/host_block.hpp"
#include "offload/store.hpp"

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

namespace infinitybatch::offload {

/// Where the storages of one call lie, one after another as one row of bytes: its beginning in the
/// arena, the rest on disk.
struct Place {
  int64_t host_bytes = 0;  ///< of the row
  int64_t disk_bytes = 0;
  std::vector<Extent> host;
  std::vector<Extent> disk;
};

/// Memory of a device that belongs at some place of the row.
struct Piece {
  std::byte* data = nullptr;
  int64_t bytes = 0;
  int64_t at = 0;
};

/// The arena and the file of a store, and who has which part of them.
class Places {
 public:
  static constexpr int64_t kHostAlignment = 64;

  Places(c10::Device device, const StoreOptions& options);

  /// The bytes of the row that storages of these sizes make.
  static int64_t row(at::ArrayRef<int64_t> storages) noexcept;
  /// What a row takes of an arena with `host_free` bytes left, and of the file.
  static Store::Need need(int64_t row, int64_t host_free) noexcept;

  /// A place for a row of bytes.
  /// \throws OffloadError where there is no room
  Place take(int64_t row);
  void give_back(const Place& place) noexcept;

  /// Copies in the calling thread. One at a time.
  /// \throws OffloadError where the disk fails
  void copy_out(const Place& place, const std::vector<Piece>& pieces, DeviceLink::Copies& copies);
  void copy_back(const Place& place, const std::vector<Piece>& pieces, DeviceLink::Copies& copies);

  /// Fills in what lies where.
  void tell(StoreStatistics& statistics) const;
  const DiskFile* file() const noexcept { return file_ ? &*file_ : nullptr; }

 private:
  void provide_memory(const Place& place);
  template <bool kOut>
  void copy_host(const Place& place, const std::vector<Piece>& pieces, DeviceLink::Copies& copies);
  template <bool kOut>
  void copy_disk(const Place& place, const std::vector<Piece>& pieces, DeviceLink::Copies& copies);
  template <bool kOut>
  void transfer(const Place& place, int64_t begin, int64_t bytes);
  [[noreturn]] void throw_disk(const Place& place, bool out, int error) const;

  mutable std::mutex mutex_;  // of the books; places may be given back in any thread
  Extents host_;
  Extents disk_;
  int64_t host_peak_ = 0;
  int64_t disk_peak_ = 0;
  HostBlock arena_;
  HostBlock staging_;  // between device and file: aligned, pinned for accelerators
  std::optional<DiskFile> file_;
};

}  // namespace infinitybatch::offload
