#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <array>
#include <map>
#include <mutex>
#include <optional>

namespace sim {

constexpr int kDevices = 2;
constexpr int kStreamsOfDevice = 16;  // 0 is the default stream
constexpr int kStreams = kDevices * kStreamsOfDevice;

inline int stream_of(int device, int64_t id) {
  return device * kStreamsOfDevice + static_cast<int>(id);
}

/// What somebody (a stream, an event, the host) knows of each stream: the number of its last op
/// that is certainly over.
using Clock = std::array<uint64_t, kStreams>;

/// One op of one stream.
struct Moment {
  int stream = 0;
  uint64_t time = 0;

  bool before(const Clock& clock) const { return clock[static_cast<size_t>(stream)] >= time; }
};

/// Who used a block of memory last.
struct History {
  std::optional<Moment> write;
  std::vector<Moment> reads;  // of each stream the last

  void add_read(Moment moment);
  void merge(const History& other);
};

/// Order of everything that streams and host do. Kernels run at once in the calling thread, which
/// is one of the orders a real device could choose; what another order could make wrong is found by
/// comparing clocks, so that a missing wait is reported in every run and not once in a thousand.
class Order {
 public:
  static Order& instance();

  /// Begins an op of `stream`. Everything that the host has seen comes before it.
  Moment begin(int stream);
  /// The op of `begin` reads or writes memory with this history.
  void use(Moment op, History& history, bool write, const std::string& what);

  Clock clock_of(int stream);
  /// What `stream` does from now on comes after everything in `clock`.
  void wait(int stream, const Clock& clock);
  /// The host has seen everything in `clock`.
  void seen_by_host(const Clock& clock);
  bool host_has_seen(Moment moment);

  /// The host waited for the device, or a caller on it for a number from the device.
  void count_sync(const std::string& kind);
  void race(const std::string& what);

  // Copies between pinned memory and the device go on after the call that started them returned.
  // Into the device: the bytes count as read when the host knows that the copy is over.
  void copy_from_pinned(Moment op, const std::byte* source, size_t bytes);
  // To the host: the bytes arrive when the host knows that the copy is over.
  void copy_to_pinned(Moment op, std::byte* to, const std::byte* from, size_t bytes);
  void forget_pinned(const std::byte* begin, size_t bytes);
  /// Compares the sources of copies that may still be under way.
  void check_pinned();

  std::map<std::string, int64_t> syncs();
  std::vector<std::string> races();
  /// Waits for everything, and forgets what was found and counted.
  void reset();

 private:
  struct LateCopy {
    Moment op;
    std::byte* host;
    std::vector<std::byte> bytes;
    bool to_host;
  };

  void settle();
  void compare(const LateCopy& copy);
  void add_race(const std::string& what);
  void before_pinned(Moment op, const std::byte* begin, size_t bytes, bool write);

  std::mutex mutex_;
  std::array<Clock, kStreams> clocks_{};
  Clock host_{};
  std::vector<LateCopy> late_;
  std::map<std::string, int64_t> syncs_;
  std::vector<std::string> races_;
};

}  // namespace sim
