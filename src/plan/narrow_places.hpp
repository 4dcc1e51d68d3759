#pragma once

#include <infinitybatch/tape/tape.hpp>

#include <cstdint>
#include <vector>

namespace infinitybatch::plan {

/// Where a tape can be cut so that little waits, and what lies between.
class NarrowPlaces {
 public:
  /// \param costs of the tape's ops in a light recording
  /// \param most  how many places at most
  NarrowPlaces(const tape::Tape& tape, const std::vector<tape::OpCost>& costs, size_t most);

  /// In front of these ops; the first is 0, the last behind the last op.
  const std::vector<uint32_t>& positions() const noexcept { return positions_; }
  /// Bytes that the ops keep for backward.
  int64_t kept(uint32_t begin, uint32_t end) const { return kept_[end] - kept_[begin]; }
  /// The most that one op holds.
  int64_t largest(uint32_t begin, uint32_t end) const;
  /// Bytes that wait in front of an op and are not needed for most of the tape anyway.
  int64_t short_waits(uint32_t op) const { return waits_[op]; }
  /// For each cut, bytes that wait there and at no cut before.
  std::vector<int64_t> waiting(const std::vector<uint32_t>& cuts) const;
  /// Bytes of the gradients of leaves that ops from this one on use: their sums are there when
  /// backward arrives in front of it.
  int64_t gradients(uint32_t op) const { return gradients_[op]; }
  /// The largest step from one place to the next: no segment can be smaller.
  int64_t smallest_step() const;

 private:
  struct Life {
    uint32_t from = 0;  // made by this op
    uint32_t to = 0;    // the last op that uses it
    int64_t bytes = 0;
  };
  void find_lives(const tape::Tape& tape);
  void find_gradients(const tape::Tape& tape);
  void forbid(const tape::Tape& tape);
  void pick(size_t most);

  std::vector<Life> lives_;    // of each memory that an op made and a later one uses
  std::vector<int64_t> kept_;  // by all ops in front of one
  std::vector<int64_t> rise_;  // of each op
  std::vector<int64_t> waits_;
  std::vector<int64_t> gradients_;
  std::vector<bool> forbidden_;
  std::vector<uint32_t> positions_;
};

}  // namespace infinitybatch::plan
