#include "offload/host_block.hpp"

#include <infinitybatch/core/bytes.hpp>
#include <infinitybatch/core/errors.hpp>

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

namespace infinitybatch::offload {
namespace {

/// Of pinned memory: the first chunk, and up to which each is as large as those before together.
constexpr int64_t kLeastChunk = int64_t{16} << 20;
constexpr int64_t kLargestChunk = int64_t{256} << 20;

int64_t power_of_two_in(int64_t bytes) {
  return static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(bytes)));
}

[[noreturn]] void throw_refused(int64_t bytes, const std::string& why) {
  throw OffloadError(bytes, 0,
                     "the system refused " + format_bytes(bytes) +
                         " of host memory for offloaded tensors (" + why +
                         "); give the host less (host_budget), so that more goes to disk");
}

}  // namespace

HostBlock::HostBlock(int64_t bytes, c10::Device device)
    : device_(device), bytes_((bytes + kPage - 1) / kPage * kPage) {
  if (bytes_ == 0) return;
  if (device.is_cpu()) {
    chunks_.reserve(1);
    void* data = mmap(nullptr, static_cast<size_t>(bytes_), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) throw_refused(bytes_, std::strerror(errno));
    // Only a hint: with large pages the first use of the arena costs a fraction of the time.
    madvise(data, static_cast<size_t>(bytes_), MADV_HUGEPAGE);
    chunks_.push_back({0, bytes_, static_cast<std::byte*>(data), {}});
    provided_ = 1;
    return;
  }
  for (int64_t begin = 0; begin < bytes_;) {
    const int64_t most = std::clamp(power_of_two_in(begin), kLeastChunk, kLargestChunk);
    const int64_t size = std::min(most, power_of_two_in(bytes_ - begin));
    chunks_.push_back({begin, size, nullptr, {}});
    begin += size;
  }
}

void HostBlock::provide(int64_t end) {
  if (provided_ == chunks_.size() || chunks_[provided_].begin >= end) return;
  at::HostAllocator* allocator = at::getHostAllocator(device_.type());
  if (allocator == nullptr) {
    throw Unsupported("torch has no pinned host memory for the device '" + device_.str() +
                      "', which offload needs; offload to disk alone is not possible either");
  }
  const c10::impl::VirtualGuardImpl guard(device_.type());
  const c10::Device before = guard.exchangeDevice(device_);
  try {
    for (; provided_ < chunks_.size() && chunks_[provided_].begin < end; ++provided_) {
      Chunk& chunk = chunks_[provided_];
      chunk.pinned = allocator->allocate(static_cast<size_t>(chunk.bytes));
      chunk.data = static_cast<std::byte*>(chunk.pinned.get());
    }
  } catch (const c10::Error& error) {
    guard.uncheckedSetDevice(before);
    throw_refused(chunks_[provided_].bytes, error.what_without_backtrace());
  }
  guard.uncheckedSetDevice(before);
}

HostBlock::~HostBlock() {
  for (const Chunk& chunk : chunks_) {
    if (chunk.data != nullptr && !chunk.pinned)
      munmap(chunk.data, static_cast<size_t>(chunk.bytes));
  }
}

std::span<std::byte> HostBlock::piece(int64_t begin, int64_t most) const {
  const auto next =
      std::upper_bound(chunks_.begin(), chunks_.end(), begin,
                       [](int64_t offset, const Chunk& chunk) { return offset < chunk.begin; });
  const Chunk& chunk = *std::prev(next);
  const int64_t inside = begin - chunk.begin;
  return {chunk.data + inside, static_cast<size_t>(std::min(most, chunk.bytes - inside))};
}

}  // namespace infinitybatch::offload
