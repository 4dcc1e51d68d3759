#include "offload/places.hpp"

#include <infinitybatch/core/bytes.hpp>
#include <infinitybatch/core/errors.hpp>

#include <algorithm>
#include <cstring>

namespace infinitybatch::offload {
namespace {

/// Large enough that a disk reaches its speed, small enough to be no matter beside an arena.
constexpr int64_t kStaging = int64_t{8} << 20;

int64_t round_up(int64_t bytes, int64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

int64_t disk_capacity(const StoreOptions& options) {
  // Far beyond every file system, and sums stay within int64_t.
  return options.disk ? std::min(options.disk_bytes, int64_t{1} << 60) : 0;
}

/// Calls `visit(place in the medium, bytes, place in the range)` for the stretches that the bytes
/// `begin` to `begin + bytes` of a row occupy.
template <typename Visit>
void for_each_stretch(const std::vector<Extent>& extents, int64_t begin, int64_t bytes,
                      const Visit& visit) {
  int64_t first = 0;  // of the extent, in the row
  for (const Extent& extent : extents) {
    const int64_t from = std::max(begin, first);
    const int64_t to = std::min(begin + bytes, first + extent.bytes);
    if (from < to) visit(extent.begin + from - first, to - from, from - begin);
    first += extent.bytes;
  }
}

template <bool kOut>
void copy_piece(std::byte* host, std::byte* device, int64_t bytes, DeviceLink::Copies& copies) {
  if constexpr (kOut) {
    copies.to_host(host, device, bytes);
  } else {
    copies.to_device(device, host, bytes);
  }
}

}  // namespace

Places::Places(c10::Device device, const StoreOptions& options)
    : host_(options.host_bytes, kHostAlignment),
      disk_(disk_capacity(options), DiskFile::kAlignment),
      arena_(host_.capacity(), device),
      staging_(options.disk ? kStaging : 0, device) {
  if (options.disk) file_.emplace(options.file);
}

void Places::provide_memory(const Place& place) {
  for (const Extent& extent : place.host) arena_.provide(extent.begin + extent.bytes);
  if (place.disk_bytes > 0) staging_.provide(staging_.bytes());
}

int64_t Places::row(at::ArrayRef<int64_t> storages) noexcept {
  int64_t bytes = 0;
  for (const int64_t storage : storages) bytes += round_up(storage, kHostAlignment);
  return bytes;
}

Store::Need Places::need(int64_t row, int64_t host_free) noexcept {
  const int64_t host = std::min(row, host_free);
  return {host, round_up(row - host, DiskFile::kAlignment)};
}

Place Places::take(int64_t row) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Store::Need need = Places::need(row, host_.free());
  Place place{need.host, need.disk, {}, {}};
  if (place.disk_bytes > disk_.free()) {
    const int64_t free = host_.free() + disk_.free();
    throw OffloadError(
        row, free,
        "offload " + format_bytes(row) + " needs more than is left: " + format_bytes(host_.free()) +
            " of " + format_bytes(host_.capacity()) + " on the host, " +
            (file_
                 ? format_bytes(disk_.free()) + " of " + format_bytes(disk_.capacity()) + " on disk"
                 : std::string("and no disk is allowed")) +
            "; raise host_budget or what may go to disk");
  }
  place.host = host_.take(place.host_bytes);
  try {
    place.disk = disk_.take(place.disk_bytes);
    provide_memory(place);
  } catch (...) {
    host_.give_back(place.host);
    disk_.give_back(place.disk);
    throw;
  }
  host_peak_ = std::max(host_peak_, host_.used());
  disk_peak_ = std::max(disk_peak_, disk_.used());
  return place;
}

void Places::give_back(const Place& place) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  host_.give_back(place.host);
  disk_.give_back(place.disk);
}

void Places::tell(StoreStatistics& statistics) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  statistics.host_bytes = host_.used();
  statistics.host_peak = host_peak_;
  statistics.disk_bytes = disk_.used();
  statistics.disk_peak = disk_peak_;
}

template <bool kOut>
void Places::copy_host(const Place& place, const std::vector<Piece>& pieces,
                       DeviceLink::Copies& copies) {
  for (const Piece& piece : pieces) {
    const int64_t bytes = std::min(piece.bytes, place.host_bytes - piece.at);
    if (bytes <= 0) continue;
    for_each_stretch(place.host, piece.at, bytes, [&](int64_t at, int64_t length, int64_t done) {
      while (length > 0) {
        const auto part = arena_.piece(at, length);
        const auto size = static_cast<int64_t>(part.size());
        copy_piece<kOut>(part.data(), piece.data + done, size, copies);
        at += size;
        done += size;
        length -= size;
      }
    });
  }
}

template <bool kOut>
void Places::transfer(const Place& place, int64_t begin, int64_t bytes) {
  std::byte* staging = staging_.piece(0, kStaging).data();
  int error = 0;
  for_each_stretch(place.disk, begin, disk_.rounded(bytes),
                   [&](int64_t at, int64_t length, int64_t done) {
                     if (error != 0) return;
                     error = kOut ? file_->write(staging + done, length, at)
                                  : file_->read(staging + done, length, at);
                   });
  if (error != 0) throw_disk(place, kOut, error);
}

template <bool kOut>
void Places::copy_disk(const Place& place, const std::vector<Piece>& pieces,
                       DeviceLink::Copies& copies) {
  std::byte* staging = staging_.piece(0, kStaging).data();
  size_t next = 0;  // the first piece that is not done
  for (int64_t begin = 0; begin < place.disk_bytes; begin += kStaging) {
    const int64_t row = place.host_bytes + begin;
    const int64_t bytes = std::min(kStaging, place.disk_bytes - begin);
    if (!kOut) transfer<kOut>(place, begin, bytes);
    while (next < pieces.size() && pieces[next].at + pieces[next].bytes <= row) ++next;
    for (size_t i = next; i < pieces.size() && pieces[i].at < row + bytes; ++i) {
      const int64_t from = std::max(pieces[i].at, row);
      const int64_t to = std::min(pieces[i].at + pieces[i].bytes, row + bytes);
      copy_piece<kOut>(staging + (from - row), pieces[i].data + (from - pieces[i].at), to - from,
                       copies);
    }
    copies.finish();
    if (kOut) transfer<kOut>(place, begin, bytes);
  }
}

void Places::copy_out(const Place& place, const std::vector<Piece>& pieces,
                      DeviceLink::Copies& copies) {
  copy_host<true>(place, pieces, copies);
  if (place.disk_bytes > 0) copy_disk<true>(place, pieces, copies);
  copies.finish();
}

void Places::copy_back(const Place& place, const std::vector<Piece>& pieces,
                       DeviceLink::Copies& copies) {
  copy_host<false>(place, pieces, copies);
  if (place.disk_bytes > 0) copy_disk<false>(place, pieces, copies);
  copies.finish();
}

void Places::throw_disk(const Place& place, bool out, int error) const {
  const int64_t available = file_->available();
  const bool full = error == ENOSPC || error == EDQUOT || error == EFBIG;
  std::string message = out ? "writing " : "reading back ";
  message += format_bytes(place.disk_bytes) + " of offloaded tensors on disk in '" +
             file_->directory() + "' failed (" + std::strerror(error) + ")";
  if (full) {
    message += "; " + format_bytes(available) + " are available there; ";
    message += "choose another directory, raise host_budget, or use a larger memory_budget";
  } else {
    message += "; choose another directory";
  }
  throw OffloadError(place.disk_bytes, available, message);
}

}  // namespace infinitybatch::offload
