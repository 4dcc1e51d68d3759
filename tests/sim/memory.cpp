#include "memory.hpp"

#include "device.hpp"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace sim {
namespace {

constexpr size_t kArena = size_t{1} << 38;  // address space, not memory
constexpr size_t kRound = 512;
constexpr size_t kMiB = size_t{1} << 20;
constexpr int kPoison = 0xFF;  // not a number, or -1
constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

size_t round_up(size_t bytes, size_t to) {
  return (bytes + to - 1) / to * to;
}

struct Arena {
  Arena() {
    file = memfd_create("sim", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, static_cast<off_t>(kArena)) != 0) std::abort();
    const auto map = [this](int protection) {
      void* at = mmap(nullptr, kArena, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
      if (at == MAP_FAILED) std::abort();
      return static_cast<std::byte*>(at);
    };
    device = map(PROT_NONE);
    host = map(PROT_READ | PROT_WRITE);
  }

  int file;
  std::byte* device;
  std::byte* host;
};

Arena& arena(int device) {
  static auto& arenas = *new std::array<Arena, kDevices>;
  return arenas[static_cast<size_t>(device)];
}

struct Block {
  size_t bytes = 0;
  size_t counted = 0;  // what statistics say of it
  size_t segment = 0;  // where its segment begins
  size_t segment_bytes = 0;
  int stream = 0;
  bool small = false;
  bool used = false;
  std::vector<int> recorded;  // streams that use it beside its own
  History history;
};

/// The caching allocator of one device: segments of one stream, cut into blocks.
class Pool {
 public:
  explicit Pool(int device) : device_(device) {}

  size_t allocate(size_t requested, int stream) {
    const bool fails = settings().fail_after == 0;
    if (settings().fail_after >= 0) --settings().fail_after;
    const size_t bytes = round_up(requested, kRound);
    const bool small = bytes <= kMiB;
    auto found = fails ? blocks_.end() : find(bytes, stream, small);
    if (found == blocks_.end() && !fails) found = add_segment(bytes, stream, small);
    if (found == blocks_.end() && !fails) {
      release_segments();
      ++stats.num_alloc_retries;
      found = add_segment(bytes, stream, small);
    }
    if (found == blocks_.end()) out_of_memory(requested);
    split(found, bytes, small);
    Block& block = found->second;
    block.used = true;
    block.counted = settings().rounding ? block.bytes : requested;
    stats.allocation[kAll].increase(1);
    stats.allocated_bytes[kAll].increase(block.counted);
    stats.requested_bytes[kAll].increase(requested);
    std::memset(arena(device_).host + found->first, kPoison, block.bytes);
    return found->first;
  }

  /// \returns what statistics said of it
  size_t free(size_t begin) {
    const auto found = blocks_.find(begin);
    TORCH_CHECK(found != blocks_.end() && found->second.used, "sim: memory is freed twice");
    Block& block = found->second;
    const size_t counted = block.counted;
    block.used = false;
    stats.allocation[kAll].decrease(1);
    stats.allocated_bytes[kAll].decrease(counted);
    std::memset(arena(device_).host + begin, kPoison, block.bytes);
    // A block that record_stream named is given to nobody before those streams are done with it.
    std::erase_if(block.history.reads,
                  [&](const Moment& read) { return is_recorded(block, read); });
    if (block.history.write && is_recorded(block, *block.history.write)) {
      block.history.write.reset();
    }
    block.recorded.clear();
    join(found);
    return counted;
  }

  Block* block_at(size_t offset) {
    auto next = blocks_.upper_bound(offset);
    if (next == blocks_.begin()) return nullptr;
    --next;
    return offset < next->first + next->second.bytes ? &next->second : nullptr;
  }

  void release_segments() {
    for (auto at = blocks_.begin(); at != blocks_.end();) {
      Block& block = at->second;
      if (block.used || block.bytes != block.segment_bytes) {
        ++at;
        continue;
      }
      fallocate(arena(device_).file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                static_cast<off_t>(at->first), static_cast<off_t>(block.bytes));
      stats.reserved_bytes[kAll].decrease(block.bytes);
      stats.segment[kAll].decrease(1);
      at = blocks_.erase(at);
    }
  }

  int64_t live() const {
    return std::count_if(blocks_.begin(), blocks_.end(),
                         [](const auto& b) { return b.second.used; });
  }

  c10::CachingDeviceAllocator::DeviceStats stats;

 private:
  using At = std::map<size_t, Block>::iterator;

  static bool is_recorded(const Block& block, const Moment& moment) {
    return std::find(block.recorded.begin(), block.recorded.end(), moment.stream) !=
           block.recorded.end();
  }

  At find(size_t bytes, int stream, bool small) {
    auto best = blocks_.end();
    for (auto at = blocks_.begin(); at != blocks_.end(); ++at) {
      const Block& block = at->second;
      if (block.used || block.stream != stream || block.small != small || block.bytes < bytes) {
        continue;
      }
      if (best == blocks_.end() || block.bytes < best->second.bytes) best = at;
    }
    return best;
  }

  At add_segment(size_t bytes, int stream, bool small) {
    size_t size = bytes;
    if (settings().rounding) {
      size = small ? 2 * kMiB : bytes < 10 * kMiB ? 20 * kMiB : round_up(bytes, 2 * kMiB);
    }
    if (stats.reserved_bytes[kAll].current + static_cast<int64_t>(size) > settings().capacity ||
        top_ + size > kArena) {
      return blocks_.end();
    }
    const size_t begin = top_;
    top_ += round_up(size, 4096);
    stats.reserved_bytes[kAll].increase(size);
    stats.segment[kAll].increase(1);
    return blocks_.emplace(begin, Block{size, 0, begin, size, stream, small, false, {}, {}}).first;
  }

  void split(At at, size_t bytes, bool small) {
    Block& block = at->second;
    const size_t rest = block.bytes - bytes;
    // CUDA leaves the rest of a large block at it where it is small.
    const size_t least = settings().rounding && !small ? kMiB + 1 : kRound;
    if (rest < least) return;
    Block remaining = block;
    remaining.bytes = rest;
    block.bytes = bytes;
    blocks_.emplace(at->first + bytes, std::move(remaining));
  }

  void join(At at) {
    const auto next = std::next(at);
    if (next != blocks_.end() && !next->second.used && next->second.segment == at->second.segment) {
      at->second.bytes += next->second.bytes;
      at->second.history.merge(next->second.history);
      blocks_.erase(next);
    }
    if (at == blocks_.begin()) return;
    const auto before = std::prev(at);
    if (before->second.used || before->second.segment != at->second.segment) return;
    before->second.bytes += at->second.bytes;
    before->second.history.merge(at->second.history);
    blocks_.erase(at);
  }

  [[noreturn]] void out_of_memory(size_t bytes) {
    ++stats.num_ooms;
    const int64_t live = stats.allocated_bytes[kAll].current;
    const c10::Device device(kType, static_cast<c10::DeviceIndex>(device_));
    c10::reportOutOfMemoryToProfiler(static_cast<int64_t>(bytes), static_cast<size_t>(live),
                                     static_cast<size_t>(stats.reserved_bytes[kAll].current),
                                     device);
    TORCH_CHECK_WITH(OutOfMemoryError, false, "sim out of memory. Tried to allocate ", bytes,
                     " bytes on ", device, ", which has ", settings().capacity, " and where ", live,
                     " are allocated.");
  }

  const int device_;
  size_t top_ = 0;
  std::map<size_t, Block> blocks_;
};

std::mutex& pools_mutex() {
  static auto& mutex = *new std::mutex;
  return mutex;
}

Pool& pool(int device) {
  static auto& pools = *new std::array<Pool, kDevices>{Pool(0), Pool(1)};
  return pools.at(static_cast<size_t>(device));
}

size_t offset_of(const void* address, int device) {
  return static_cast<size_t>(static_cast<const std::byte*>(address) - arena(device).device);
}

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device();
    const c10::Device where(kType, static_cast<c10::DeviceIndex>(device));
    if (bytes == 0) return {nullptr, nullptr, &free, where};
    void* address = nullptr;
    size_t counted = 0;
    {
      const std::lock_guard<std::mutex> lock(pools_mutex());
      const size_t begin = pool(device).allocate(bytes, current_stream(device));
      counted = pool(device).block_at(begin)->counted;
      address = arena(device).device + begin;
    }
    report(address, static_cast<int64_t>(counted), device);
    return {address, address, &free, where};
  }

  static void free(void* address) {
    if (address == nullptr) return;
    const int device = device_of(address);
    size_t counted = 0;
    {
      const std::lock_guard<std::mutex> lock(pools_mutex());
      counted = pool(device).free(offset_of(address, device));
    }
    report(address, -static_cast<int64_t>(counted), device);
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t count) const override {
    std::memcpy(host_side(to), host_side(from), count);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t /*pool*/) override {
    const std::lock_guard<std::mutex> lock(pools_mutex());
    for (int device = 0; device < kDevices; ++device) pool(device).release_segments();
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (data.get() == nullptr) return;
    const int device = device_of(data.get());
    const std::lock_guard<std::mutex> lock(pools_mutex());
    Block* block = pool(device).block_at(offset_of(data.get(), device));
    if (block != nullptr) block->recorded.push_back(stream_of(stream.device_index(), stream.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const std::lock_guard<std::mutex> lock(pools_mutex());
    return pool(device).stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    const std::lock_guard<std::mutex> lock(pools_mutex());
    pool(device).stats.allocated_bytes[kAll].reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    const std::lock_guard<std::mutex> lock(pools_mutex());
    auto& stats = pool(device).stats;
    stats.allocated_bytes[kAll].reset_peak();
    stats.reserved_bytes[kAll].reset_peak();
    stats.requested_bytes[kAll].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const std::lock_guard<std::mutex> lock(pools_mutex());
    const int64_t total = settings().capacity;
    const int64_t free = total - pool(device).stats.reserved_bytes[kAll].current;
    return {static_cast<size_t>(std::max<int64_t>(0, free)), static_cast<size_t>(total)};
  }

 private:
  static void report(void* address, int64_t bytes, int device) {
    if (!c10::memoryProfilingEnabled()) return;
    int64_t live = 0;
    int64_t reserved = 0;
    {
      const std::lock_guard<std::mutex> lock(pools_mutex());
      live = pool(device).stats.allocated_bytes[kAll].current;
      reserved = pool(device).stats.reserved_bytes[kAll].current;
    }
    c10::reportMemoryUsageToProfiler(address, bytes, static_cast<size_t>(live),
                                     static_cast<size_t>(reserved),
                                     c10::Device(kType, static_cast<c10::DeviceIndex>(device)));
  }
};

// Pinned memory: ordinary pages that the device is told of.
struct PinnedBlocks {
  std::mutex mutex;
  std::map<const std::byte*, size_t> sizes;

  static PinnedBlocks& instance() {
    static auto& blocks = *new PinnedBlocks;
    return blocks;
  }
};

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &free, c10::Device(c10::DeviceType::CPU)};
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(data != MAP_FAILED, "sim: the host has no pinned memory left");
    PinnedBlocks& blocks = PinnedBlocks::instance();
    const std::lock_guard<std::mutex> lock(blocks.mutex);
    blocks.sizes[static_cast<std::byte*>(data)] = bytes;
    return {data, data, &free, c10::Device(c10::DeviceType::CPU)};
  }
  static void free(void* data) {
    if (data == nullptr) return;
    PinnedBlocks& blocks = PinnedBlocks::instance();
    size_t bytes = 0;
    {
      const std::lock_guard<std::mutex> lock(blocks.mutex);
      const auto found = blocks.sizes.find(static_cast<std::byte*>(data));
      bytes = found->second;
      blocks.sizes.erase(found);
    }
    Order::instance().forget_pinned(static_cast<std::byte*>(data), bytes);
    munmap(data, bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t count) const override {
    std::memcpy(to, from, count);
  }
  bool record_event(void* /*data*/, void* /*context*/, c10::Stream /*stream*/) override {
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

PinnedAllocator& pinned() {
  static auto& allocator = *new PinnedAllocator;
  return allocator;
}

const bool memory_registered = [] {
  c10::SetAllocator(kType, &allocator());
  at::setHostAllocator(kType, &pinned());
  return true;
}();

}  // namespace

Settings& settings() {
  static Settings settings;
  return settings;
}

int device_of(const void* address) {
  const auto* at = static_cast<const std::byte*>(address);
  for (int device = 0; device < kDevices; ++device) {
    const std::byte* begin = arena(device).device;
    if (at >= begin && at < begin + kArena) return device;
  }
  return -1;
}

std::byte* host_side(const void* address) {
  const int device = device_of(address);
  return device < 0 ? nullptr : arena(device).host + offset_of(address, device);
}

void use(Moment op, const void* address, bool write, const char* what) {
  const int device = device_of(address);
  if (device < 0) return;
  const std::lock_guard<std::mutex> lock(pools_mutex());
  Block* block = pool(device).block_at(offset_of(address, device));
  if (block == nullptr || !block->used) {
    return Order::instance().race(std::string(what) + " uses memory that was freed");
  }
  Order::instance().use(op, block->history, write, what);
}

c10::DeviceAllocator& allocator() {
  static auto& allocator = *new Allocator;
  return allocator;
}

int64_t live_blocks() {
  const std::lock_guard<std::mutex> lock(pools_mutex());
  return pool(0).live() + pool(1).live();
}

bool is_pinned(const void* address) {
  PinnedBlocks& blocks = PinnedBlocks::instance();
  const std::lock_guard<std::mutex> lock(blocks.mutex);
  const auto* at = static_cast<const std::byte*>(address);
  const auto next = blocks.sizes.upper_bound(at);
  if (next == blocks.sizes.begin()) return false;
  const auto found = std::prev(next);
  return at < found->first + found->second;
}

c10::Allocator& pinned_allocator() {
  return pinned();
}

}  // namespace sim
