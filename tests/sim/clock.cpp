#include "clock.hpp"

#include <algorithm>
#include <cstring>

namespace sim {
namespace {

void merge(Clock& clock, const Clock& other) {
  for (size_t i = 0; i < clock.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

bool overlap(const std::byte* a, size_t a_bytes, const std::byte* b, size_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

}  // namespace

void History::add_read(Moment moment) {
  for (Moment& read : reads) {
    if (read.stream != moment.stream) continue;
    read.time = std::max(read.time, moment.time);
    return;
  }
  reads.push_back(moment);
}

void History::merge(const History& other) {
  for (const Moment& read : other.reads) add_read(read);
  // Two last writes of joined blocks: the second is kept as a read, which the next write of the
  // joined block has to come after all the same.
  if (other.write && write) add_read(*other.write);
  if (!write) write = other.write;
}

Order& Order::instance() {
  static auto& order = *new Order;  // outlives every tensor
  return order;
}

Moment Order::begin(int stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Clock& clock = clocks_[static_cast<size_t>(stream)];
  merge(clock, host_);
  return {stream, ++clock[static_cast<size_t>(stream)]};
}

void Order::use(Moment op, History& history, bool write, const std::string& what) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const Clock& clock = clocks_[static_cast<size_t>(op.stream)];
  const auto wrong = [&](const Moment& earlier) { return !earlier.before(clock); };
  if (history.write && wrong(*history.write)) {
    add_race(what + (write ? " writes" : " reads") + " memory on stream " +
             std::to_string(op.stream) + " without waiting for a write on stream " +
             std::to_string(history.write->stream));
  }
  if (!write) return history.add_read(op);
  for (const Moment& read : history.reads) {
    if (!wrong(read)) continue;
    add_race(what + " writes memory on stream " + std::to_string(op.stream) +
             " without waiting for a use on stream " + std::to_string(read.stream));
  }
  history.reads.clear();
  history.write = op;
}

Clock Order::clock_of(int stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return clocks_[static_cast<size_t>(stream)];
}

void Order::wait(int stream, const Clock& clock) {
  const std::lock_guard<std::mutex> lock(mutex_);
  merge(clocks_[static_cast<size_t>(stream)], clock);
}

void Order::seen_by_host(const Clock& clock) {
  const std::lock_guard<std::mutex> lock(mutex_);
  merge(host_, clock);
  settle();
}

bool Order::host_has_seen(Moment moment) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return moment.before(host_);
}

void Order::count_sync(const std::string& kind) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++syncs_[kind];
}

void Order::race(const std::string& what) {
  const std::lock_guard<std::mutex> lock(mutex_);
  add_race(what);
}

void Order::add_race(const std::string& what) {
  if (races_.size() < 20) races_.push_back(what);
}

void Order::before_pinned(Moment op, const std::byte* begin, size_t bytes, bool write) {
  const Clock& clock = clocks_[static_cast<size_t>(op.stream)];
  std::erase_if(late_, [&](const LateCopy& copy) {
    if (!overlap(copy.host, copy.bytes.size(), begin, bytes)) return false;
    if (!copy.to_host && !write) return false;  // two reads
    if (!copy.op.before(clock)) {
      add_race("a copy uses pinned memory without waiting for an earlier copy of it");
    }
    if (copy.to_host) {
      std::memcpy(copy.host, copy.bytes.data(), copy.bytes.size());
    } else {
      compare(copy);
    }
    return true;
  });
}

void Order::copy_from_pinned(Moment op, const std::byte* source, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  before_pinned(op, source, bytes, false);
  late_.push_back({op, const_cast<std::byte*>(source), {source, source + bytes}, false});
}

void Order::copy_to_pinned(Moment op, std::byte* to, const std::byte* from, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  before_pinned(op, to, bytes, true);
  late_.push_back({op, to, {from, from + bytes}, true});
  std::memset(to, 0xFF, bytes);  // a host that does not wait reads this
}

void Order::forget_pinned(const std::byte* begin, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  // Real pinned memory that is freed while a copy reads it is kept until the copy is over.
  std::erase_if(late_, [&](const LateCopy& copy) {
    if (!overlap(copy.host, copy.bytes.size(), begin, bytes)) return false;
    if (!copy.to_host) compare(copy);
    return true;
  });
}

void Order::compare(const LateCopy& copy) {
  if (std::memcmp(copy.host, copy.bytes.data(), copy.bytes.size()) != 0) {
    add_race("the host overwrote pinned memory before the copy of it to the device was over");
  }
}

void Order::settle() {
  std::erase_if(late_, [&](const LateCopy& copy) {
    if (!copy.op.before(host_)) return false;
    if (copy.to_host) {
      std::memcpy(copy.host, copy.bytes.data(), copy.bytes.size());
    } else {
      compare(copy);
    }
    return true;
  });
}

void Order::check_pinned() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const LateCopy& copy : late_) {
    if (!copy.to_host) compare(copy);
  }
}

std::map<std::string, int64_t> Order::syncs() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return syncs_;
}

std::vector<std::string> Order::races() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return races_;
}

void Order::reset() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Clock& clock : clocks_) merge(host_, clock);
  settle();
  syncs_.clear();
  races_.clear();
}

}  // namespace sim
