#include "execute/schedule.hpp"

#include <infinitybatch/execute/plan.hpp>

#include <algorithm>
#include <optional>
#include <utility>

namespace infinitybatch {
namespace {

bool begins_visit(const Instruction& instruction) {
  return instruction.operation == Operation::advance ||
         instruction.operation == Operation::advance_retained ||
         instruction.operation == Operation::resume || instruction.operation == Operation::replay;
}

/// Nothing is on its way while it runs: it may need all of the device (a loss of all outputs), or
/// there is nothing yet that could be fetched across it.
bool is_barrier(const Instruction& instruction) {
  return instruction.operation == Operation::whole_loss ||
         instruction.operation == Operation::record || instruction.operation == Operation::retain ||
         instruction.operation == Operation::penalty ||
         instruction.operation == Operation::hand_out;
}

/// Weaves copies between the visits of a plan: a micro-batch at work on a segment, from `advance`,
/// or from `resume` or `replay` to `free`. Where micro-batches are replayed, outputs leave after
/// `record`; so do graphs that are offloaded, after `retain`.
class Weaver {
 public:
  Weaver(const Plan& plan, bool overlap)
      : given_(plan.instructions),
        overlap_(overlap),
        alone_(plan.strategy == "checkpoint"),
        offloads_graphs_(plan.offloads_graphs),
        replays_(std::any_of(given_.begin(), given_.end(), &is_replay)) {}

  std::vector<Instruction> weave() {
    for (size_t i = 0; i < given_.size();) {
      if (begins_visit(given_[i])) {
        i = visit(i);
        continue;
      }
      if (replays_ && leaves_outputs(given_[i])) {
        woven_.push_back(given_[i]);
        leave(given_[i++]);
        continue;
      }
      if (is_barrier(given_[i])) settle();
      woven_.push_back(given_[i++]);
    }
    settle();
    return std::move(woven_);
  }

 private:
  static bool is_replay(const Instruction& visit) { return visit.operation == Operation::replay; }
  bool leaves_outputs(const Instruction& instruction) const {
    return instruction.operation == Operation::record ||
           (offloads_graphs_ && instruction.operation == Operation::retain);
  }
  static bool is_back(const Instruction& visit) {
    return visit.operation == Operation::resume || is_replay(visit);
  }

  /// Behind the last instruction of a visit.
  size_t end_of(size_t begin) const {
    size_t end = begin + 1;
    if (!is_back(given_[begin])) return end;
    while (given_[end - 1].operation != Operation::free) ++end;
    return end;
  }

  std::optional<size_t> next_visit(size_t from) const {
    for (size_t i = from; i < given_.size() && !is_barrier(given_[i]); ++i) {
      if (begins_visit(given_[i])) return i;
    }
    return std::nullopt;
  }

  void add(Operation operation, const Instruction& visit) {
    woven_.push_back({operation, visit.micro_batch, visit.segment, is_back(visit)});
  }

  /// What left last is away.
  void settle() {
    if (leaving_) woven_.push_back(*leaving_);
    leaving_.reset();
  }
  void settle(int64_t micro_batch) {
    if (leaving_ && leaving_->micro_batch == micro_batch) settle();
  }

  size_t visit(size_t begin) {
    const Instruction& here = given_[begin];
    const size_t end = end_of(begin);
    if (ahead_ != begin) {
      settle(here.micro_batch);
      add(Operation::restore, here);
    }
    const std::optional<size_t> next = overlap_ ? next_visit(end) : std::nullopt;
    // What a visit leaves behind is not there before its end, unless it has been all the while.
    if (next && (alone_ || given_[*next].micro_batch != here.micro_batch)) {
      settle(given_[*next].micro_batch);
      add(Operation::prefetch, given_[*next]);
      ahead_ = next;
    }
    woven_.insert(woven_.end(), given_.begin() + static_cast<std::ptrdiff_t>(begin),
                  given_.begin() + static_cast<std::ptrdiff_t>(end));
    if (is_replay(here)) {
      settle();
    } else {
      leave(here);
    }
    return end;
  }

  /// What waits after a visit; what left before is away.
  void leave(const Instruction& visit) {
    settle();
    add(overlap_ && !alone_ ? Operation::start_offload : Operation::finish_offload, visit);
    if (!overlap_ || alone_) return;
    leaving_ = woven_.back();
    leaving_->operation = Operation::finish_offload;
  }

  const std::vector<Instruction>& given_;
  bool overlap_;
  bool alone_;  // visits of one micro-batch follow each other: what the next one needs stays
  bool offloads_graphs_;  // those that are kept leave with the outputs
  bool replays_;          // a coupled loss without cuts: outputs wait, and their gradients
  std::vector<Instruction> woven_;
  std::optional<size_t> ahead_;         // the visit that was fetched for
  std::optional<Instruction> leaving_;  // what ends it
};

}  // namespace

Plan with_offload(Plan plan, bool overlap) {
  plan.instructions = Weaver(plan, overlap).weave();
  plan.offloads = true;
  plan.overlaps = overlap;
  return plan;
}

}  // namespace infinitybatch
