#include "execute/plain_numbers.hpp"

namespace infinitybatch {

PlainNumbers* PlainNumbers::at_work() noexcept {
  return ThreadContext::get().numbers;
}

PlainNumbers::Kind PlainNumbers::kind_of(const std::string& name) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = kinds_.find(name);
  return found == kinds_.end() ? Kind::unknown : found->second;
}

void PlainNumbers::learn(const std::string& name, Kind kind) {
  const std::lock_guard<std::mutex> lock(mutex_);
  kinds_[name] = kind;
}

bool PlainNumbers::left_apart() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return left_apart_;
}

void PlainNumbers::note_left_apart() {
  const std::lock_guard<std::mutex> lock(mutex_);
  left_apart_ = true;
}

bool PlainNumbers::moves() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return moves_;
}

void PlainNumbers::note_move(bool moves) {
  const std::lock_guard<std::mutex> lock(mutex_);
  moves_ = moves;
}

bool PlainNumbers::reads_apart() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return reads_apart_;
}

void PlainNumbers::learn_reads_apart() {
  const std::lock_guard<std::mutex> lock(mutex_);
  reads_apart_ = true;
}

bool PlainNumbers::reads_own() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return reads_own_;
}

void PlainNumbers::learn_reads_own() {
  const std::lock_guard<std::mutex> lock(mutex_);
  reads_own_ = true;
}

std::string PlainNumbers::lost() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return lost_;
}

void PlainNumbers::note_lost(const std::string& name) {
  const std::lock_guard<std::mutex> lock(mutex_);
  lost_ = name;
}

void PlainNumbers::begin() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++steps_;
}

bool PlainNumbers::may_ask() {
  constexpr int kMost = 16;
  const std::lock_guard<std::mutex> lock(mutex_);
  return ++asked_ <= kMost;
}

bool PlainNumbers::asks_again(bool decides) const {
  constexpr int64_t kFirst = 16;  // steps in each of which a container has another length
  const std::lock_guard<std::mutex> lock(mutex_);
  return (decides && steps_ <= kFirst) || (steps_ & (steps_ - 1)) == 0;
}

}  // namespace infinitybatch
