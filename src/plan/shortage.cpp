// What the planner does about memory that ran out: smaller sizes, and when none is left.
#include "plan/planner.hpp"

#include <infinitybatch/core/errors.hpp>

#include <algorithm>
#include <utility>

namespace infinitybatch {

bool Planner::find_last_resort() {
  // What passes the budget of a device that refuses nothing has passed it; and a second pass, or
  // sizes of which forward fails, are no streaming step, which begins again wherever memory ends.
  if (request_.measured || request_.two_pass || request_.fails_on > 0) return false;
  for (const int64_t cap : {kSmallProbe, int64_t{1}}) {
    const int64_t size = size_under(cap);
    if (known_->failed.contains(size)) continue;
    known_->last_resort = size;
    known_->largest = std::max(known_->largest, size);
    return true;
  }
  return false;
}

void Planner::refuse_smallest(int64_t needed_bytes) {
  known_->failed.clear();
  known_->last_resort = 0;
  // One sample has failed as well: that two did says nothing of their size.
  known_->largest = std::max(known_->largest, kSmallProbe);
  smallest_failed_ = true;
  const int64_t budget = request_.budget_bytes;
  int64_t smallest = INT64_MAX;
  for (int64_t cap = 1; known_->profile && cap < 2 * request_.batch_size; cap *= 2) {
    smallest = std::min(smallest, predicted_peak(size_under(cap)));
    if (!request_.two_pass) break;  // no size is predicted to need less than one sample does
  }
  const bool foreseen = known_->profile && (smallest > budget || needed_bytes == 0);
  if (foreseen) {
    const int64_t needed = std::max(smallest, budget + 1);
    throw BudgetExceeded(needed, budget, needed, smallest_plan());
  }
  throw BudgetExceeded(std::max(needed_bytes, budget + 1), budget, std::nullopt, smallest_plan());
}

void Planner::refuse_larger(int64_t needed_bytes) const {
  throw BudgetExceeded(std::max(needed_bytes, request_.budget_bytes + 1), request_.budget_bytes,
                       std::nullopt,
                       "A micro-batch of more than the " + std::to_string(request_.fails_on) +
                           " samples on which forward fails");
}

void Planner::run_short(int64_t& ceiling, int64_t to) {
  ceiling = std::min(ceiling, to);
  ++known_->shortages;
  known_->calm = 0;
}

/// What ran out of memory may have lacked what somebody else held for a while: sizes that failed
/// are tried again after 16 attempts at a step without a shortage, then after twice as many each
/// time.
bool Planner::may_try_again() {
  constexpr int64_t kFirst = 16;
  constexpr int kMostDoublings = 20;
  Knowledge& known = *known_;
  if (std::min(known.largest, known.most_retained) == INT64_MAX) return false;
  if (++known.calm <= kFirst << std::clamp(known.shortages - 1, 0, kMostDoublings)) return false;
  known.largest = known.most_retained = INT64_MAX;
  return true;
}

void Planner::ran_out_of_memory(int64_t needed_bytes, bool in_loss) {
  forget_settled_plan();
  if (borrowed_ && attempted_ > 0) return stop_borrowing();
  if (attempted_overlap_) {
    known_->in_turn = true;
    attempted_overlap_ = false;
    return;
  }
  if (attempted_retained_ > 0) {
    run_short(known_->most_retained, attempted_retained_ / 2);
    attempted_retained_ = 0;
    return;
  }
  smallest_failed_ = in_loss;
  if (in_loss) {
    throw BudgetExceeded(
        std::max(needed_bytes, request_.budget_bytes + 1), request_.budget_bytes, std::nullopt,
        "the loss on the outputs of all " + std::to_string(request_.batch_size) + " samples");
  }
  if (attempted_ == 0) {
    throw BudgetExceeded(std::max(needed_bytes, request_.budget_bytes + 1), request_.budget_bytes,
                         std::nullopt, "The step, before its first micro-batch,");
  }
  if (request_.fails_on > 0) {
    run_short(known_->largest, attempted_ - 1);
    attempted_ = 0;
    if (candidates().empty()) refuse_larger(needed_bytes);
    return;
  }
  if (request_.whole_batch_only) {
    throw BudgetExceeded(std::max(needed_bytes, request_.budget_bytes + 1), request_.budget_bytes,
                         std::nullopt,
                         "one micro-batch of all " + std::to_string(request_.batch_size) +
                             " samples (they are coupled)");
  }
  if (attempted_ <= kSmallProbe) known_->failed.insert(attempted_);
  if (attempted_ <= 1 || std::exchange(known_->last_resort, 0) > 0) {
    attempted_ = 0;
    if (!find_last_resort()) refuse_smallest(needed_bytes);
    return;
  }
  run_short(known_->largest, attempted_ - 1);
  attempted_ = 0;
  if (!known_->profile) known_->traces.clear();
}

}  // namespace infinitybatch
