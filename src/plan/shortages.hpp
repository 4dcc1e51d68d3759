#pragma once

#include "plan/request.hpp"

#include <cstdint>
#include <set>

namespace infinitybatch::plan {

/// What ran out of memory may have lacked what somebody else held for a while. Whether it is tried
/// again: after 16 attempts without a shortage, then after twice as many each time.
/// \param calm      attempts since the last shortage
/// \param shortages how many there were
bool is_time_to_try_again(int64_t calm, int64_t shortages);

/// What has run out of memory, and so is not planned until it is tried again.
class Shortages {
 public:
  Shortages() = default;
  /// \param largest size that has not
  explicit Shortages(int64_t largest) : largest_(largest) {}

  bool allows(int64_t size) const { return size <= largest_ && !failed_.contains(size); }
  int64_t largest() const noexcept { return largest_; }
  int64_t most_kept() const noexcept { return most_kept_; }
  /// Whether what is offloaded is copied in turn: copies beside compute have run out.
  bool in_turn() const noexcept { return in_turn_; }
  void copy_in_turn(bool in_turn) noexcept { in_turn_ = in_turn; }
  /// A small size that is tried whatever is predicted; 0 where there is none.
  int64_t last_resort() const noexcept { return last_resort_; }

  void lower_size(int64_t to) { lower(largest_, to); }
  /// Sizes are told in parts of what they were told in until now.
  void tell_in_parts(int64_t parts);
  void lower_kept(int64_t to) { lower(most_kept_, to); }
  /// A size ran out of memory in the step at work. Returns whether smaller ones are left beside
  /// the last resort.
  bool fail(int64_t size);
  /// Where no size is left by all that is known: a small one that has yet to fail. A prediction
  /// alone is no reason to refuse a step that can begin again. False where there is none.
  bool find_last_resort(const Request& request);
  /// The step is over: what failed in it may not fail in the next.
  void end_step();
  /// One sample has failed as well: that two did says nothing of their size.
  void end_refused_step();
  /// In front of an attempt: whether what failed is tried again from now on.
  bool may_try_again();

 private:
  void lower(int64_t& ceiling, int64_t to);

  int64_t largest_ = INT64_MAX;    // sizes above have run out of memory
  int64_t most_kept_ = INT64_MAX;  // graphs of more samples have
  int64_t shortages_ = 0;          // how often one of these fell
  int64_t calm_ = 0;               // attempts since one last did
  bool in_turn_ = false;
  std::set<int64_t> failed_;  // small sizes, in the step at work
  int64_t last_resort_ = 0;
};

}  // namespace infinitybatch::plan
