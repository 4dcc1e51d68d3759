#include "execute/pass_times.hpp"

#include "execute/assumed_times.hpp"

#include <algorithm>

namespace infinitybatch {

void PassTimes::add(const Instruction& instruction, int64_t samples, double seconds,
                    int64_t bytes) {
  Taken& taken = taken_[{instruction.operation, instruction.segment, instruction.back}];
  const auto assumed = AssumedTimes::get();
  taken.seconds += assumed && assumed->per_byte > 0 ? assumed->instruction(samples) : seconds;
  taken.bytes += bytes;
  taken.samples += samples;
}

void PassTimes::add(const PassTimes& others) {
  for (const auto& [key, other] : others.taken_) {
    Taken& taken = taken_[key];
    taken.seconds += other.seconds;
    taken.bytes += other.bytes;
    taken.samples += other.samples;
  }
}

double PassTimes::bytes_per_sample(Operation operation) const {
  const auto found = taken_.find({operation, -1, false});
  if (found == taken_.end() || found->second.samples == 0) return 0;
  return static_cast<double>(found->second.bytes) / static_cast<double>(found->second.samples);
}

void PassTimes::set_link(int64_t bytes_out, double seconds_out, int64_t bytes_back,
                         double seconds_back) {
  const auto per_byte = [](int64_t bytes, double seconds) {
    return bytes > 0 ? seconds / static_cast<double>(bytes) : 0.0;
  };
  const auto assumed = AssumedTimes::get();
  if (assumed && assumed->per_byte > 0) {
    seconds_per_byte_out_ = seconds_per_byte_back_ = assumed->per_byte;
    return;
  }
  seconds_per_byte_out_ = per_byte(bytes_out, seconds_out);
  seconds_per_byte_back_ = per_byte(bytes_back, seconds_back);
}

/// The two threads of a step, by instruction.
class CopyClock {
 public:
  CopyClock(const Plan& plan, const PassTimes& times) : plan_(plan), times_(times) {}

  void run(const Instruction& instruction) {
    using enum Operation;
    const int64_t who = instruction.micro_batch;
    const int64_t samples =
        who < 0 ? plan_.batch_size : plan_.micro_batch_sizes[static_cast<size_t>(who)];
    const auto bytes = [&](std::initializer_list<Operation> operations) {
      return bytes_of(operations, instruction) * static_cast<double>(samples);
    };
    const Operation operation = instruction.operation;
    switch (operation) {
      case restore:
      case prefetch:
        back_[who] = copy(bytes({restore, prefetch}) * times_.seconds_per_byte_back_);
        break;
      case start_offload:
        away_[who] = copy(bytes({left_by(instruction)}) * times_.seconds_per_byte_out_);
        break;
      case finish_offload: {
        const bool all = away_.contains(who) && left_by(instruction) == finish_offload;
        wait_for(away_, who);
        // What had not begun to leave.
        if (const double late = bytes({operation}); late > 0 && !all) {
          away_[who] = copy(late * times_.seconds_per_byte_out_);
          wait_for(away_, who);
        }
        break;
      }
      case advance:
      case advance_retained:
      case resume:
      case replay:
        wait_for(back_, who);
        break;
      case record:
      case whole_loss:
        away_[who] = copy(bytes({operation}) * times_.seconds_per_byte_out_);
        break;
      default:
        break;
    }
    now_ += seconds_of(told_by(instruction), instruction) * static_cast<double>(samples);
    if (operation == restore) wait_for(back_, who);
    if (operation == record || operation == whole_loss) wait_for(away_, who);
  }

  CopySeconds seconds() const { return {std::max(0.0, copied_ - waited_), waited_}; }
  double now() const noexcept { return now_; }

 private:
  /// \returns when the copy is done
  double copy(double seconds) {
    copied_ += seconds;
    return free_ = std::max(free_, now_) + seconds;
  }

  /// A graph that is kept on the device is never rehearsed: its forward takes what a recording
  /// does, and is not replayed.
  Operation told_by(const Instruction& instruction) const {
    using enum Operation;
    const auto first = static_cast<int64_t>(plan_.micro_batch_sizes.size()) - plan_.retained;
    const bool kept = !plan_.offloads_graphs && instruction.micro_batch >= first;
    if (kept && instruction.operation == retain) return record;
    // Takes nothing that was measured.
    return kept && instruction.operation == replay ? retain : instruction.operation;
  }

  /// Who copied what `start_offload` would: in turn `finish_offload` does it all.
  Operation left_by(const Instruction& of) const {
    using enum Operation;
    return times_.taken_.contains({start_offload, of.segment, of.back}) ? start_offload
                                                                        : finish_offload;
  }

  void wait_for(std::map<int64_t, double>& ends, int64_t who) {
    const auto end = ends.find(who);
    if (end == ends.end()) return;
    waited_ += std::max(0.0, end->second - now_);
    now_ = std::max(now_, end->second);
    ends.erase(end);
  }

  /// By sample.
  double bytes_of(std::initializer_list<Operation> operations, const Instruction& of) const {
    double bytes = 0;
    double samples = 0;
    for (const Operation operation : operations) {
      const auto found = times_.taken_.find({operation, of.segment, of.back});
      if (found == times_.taken_.end()) continue;
      bytes += static_cast<double>(found->second.bytes);
      samples += static_cast<double>(found->second.samples);
    }
    return samples > 0 ? bytes / samples : 0;
  }

  double seconds_of(Operation operation, const Instruction& of) const {
    const auto found = times_.taken_.find({operation, of.segment, of.back});
    if (found == times_.taken_.end() || found->second.samples == 0) return 0;
    return found->second.seconds / static_cast<double>(found->second.samples);
  }

  const Plan& plan_;
  const PassTimes& times_;
  double now_ = 0;                  // of the thread that computes
  double free_ = 0;                 // when the one that copies has done everything
  std::map<int64_t, double> back_;  // when a micro-batch's values are there
  std::map<int64_t, double> away_;
  double copied_ = 0;
  double waited_ = 0;
};

CopySeconds simulate_copies(const Plan& plan, const PassTimes& times) {
  CopyClock clock(plan, times);
  for (const Instruction& instruction : plan.instructions) clock.run(instruction);
  return clock.seconds();
}

double simulate_seconds(const Plan& plan, const PassTimes& times) {
  CopyClock clock(plan, times);
  for (const Instruction& instruction : plan.instructions) clock.run(instruction);
  return clock.now();
}

}  // namespace infinitybatch
