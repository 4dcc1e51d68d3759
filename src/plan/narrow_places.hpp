#pragma once

#include "tape/tape.hpp"

#include <cstdint>
#include <vector>

namespace infinitybatch::plan {

/// Where a tape can be cut so that little waits, and what lies between.
class NarrowPlaces {
 public:
  /// \param costs of a light recording of the same program
  /// \param most   how many places at most
  /// \param summed the sums of all gradients are there from the beginning
  /// \param always ops in front of which it is cut anyway, rising: of these stretches each begins
  ///               when all that is behind it is done
  /// \param reach  how many places further a segment may end
  NarrowPlaces(const tape::Tape& tape, const tape::Costs& costs, size_t most, bool summed,
               const std::vector<uint32_t>& always, size_t reach = kAnywhere);
  static constexpr size_t kAnywhere = SIZE_MAX;
  /// Of segments that are longer than that.
  static constexpr int64_t kTooFar = INT64_MAX >> 20;

  /// In front of these ops; the first is 0, the last behind the last op.
  const std::vector<uint32_t>& positions() const noexcept { return positions_; }
  /// The most that is there while the ops between two places (numbers of `positions`) are played
  /// and while their backward runs: what they keep and what a later op still reads, the gradients
  /// on their way, and the sums of the parameters' gradients. What waits in front is left out.
  int64_t at_work(size_t begin, size_t end) const {
    return end - begin > reach_ ? kTooFar : at_work_[begin * (reach_ + 1) + (end - begin)];
  }
  size_t reach() const noexcept { return reach_; }
  /// Bytes that wait in front of an op and are not needed for most of the tape anyway.
  int64_t short_waits(uint32_t op) const { return waits_[op]; }
  /// For each cut, bytes that wait there and at no cut before.
  std::vector<int64_t> waiting(const std::vector<uint32_t>& cuts) const;
  /// Bytes of the gradients of leaves that ops from this one on use: their sums are there when
  /// backward arrives in front of it.
  int64_t gradients(uint32_t op) const { return gradients_[op]; }
  /// The most that is kept between a place and the next: no segment can be smaller.
  int64_t smallest_step() const noexcept { return smallest_step_; }

 private:
  struct Life {
    uint32_t from = 0;  // made by this op
    uint32_t to = 0;    // the last op that uses it
    int64_t bytes = 0;
    uint32_t saved = 0;   // the first op whose backward needs it; UINT32_MAX: none
    uint32_t memory = 0;  // its number on the tape
  };
  void find_lives(const tape::Tape& tape, const tape::Costs& costs);
  void find_gradients(const tape::Tape& tape);
  void forbid(const tape::Tape& tape);
  void find_flights(const tape::Tape& tape);
  void pick(size_t most, const std::vector<uint32_t>& always);
  void play(bool summed, const std::vector<uint32_t>& always);

  std::vector<Life> lives_;       // of each memory that an op made and a later one uses
  std::vector<int64_t> kept_;     // by all ops in front of one, results that nothing needs included
  std::vector<int64_t> own_;      // what each op keeps for backward beside arguments and results
  std::vector<int64_t> at_work_;  // from each place to those in reach
  size_t reach_ = 0;
  int64_t smallest_step_ = 1;
  std::vector<int64_t> workspace_;  // of each op
  std::vector<int64_t> flights_;    // the most that an op's backward has beside what is kept
  std::vector<int64_t> crossing_;  // bytes of what an op or one before it made and a later one uses
  std::vector<int64_t> waits_;
  std::vector<int64_t> gradients_;
  std::vector<bool> forbidden_;
  std::vector<uint32_t> positions_;
};

}  // namespace infinitybatch::plan
