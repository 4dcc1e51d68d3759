#include "execute/simulator.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

namespace infinitybatch {
namespace {

using Effect = MicroBatchProfile::Effect;

RowsAtLength rows_at(const Plan& plan, size_t index) {
  const auto rows = static_cast<double>(plan.micro_batch_sizes[index]);
  return {rows, plan.lengths.empty() ? 0 : plan.lengths[index]};
}

/// Allocates what each output's gradient takes.
Step seed_of_outputs(const Plan& plan) {
  return {Operation::seed, plan.strategy == "cut" ? plan.segments - 1 : -1};
}

/// The effects of one plan's instructions. Most micro-batches are alike: each distinct (operation,
/// size, first) is told once.
class Effects {
 public:
  Effects(const Plan& plan, const MicroBatchProfile& profile, bool begun, bool outputs_offload)
      : plan_(plan),
        profile_(profile),
        whole_loss_(plan.computes_whole_loss()),
        outputs_offload_(outputs_offload),
        first_(!begun) {}

  Effect of(const Instruction& instruction) {
    const int64_t index = instruction.micro_batch;
    const RowsAtLength size = rows_at(plan_, static_cast<size_t>(index));
    note(instruction);
    const bool retained =
        index >= static_cast<int64_t>(plan_.micro_batch_sizes.size()) - plan_.retained;
    switch (instruction.operation) {
      case Operation::retain: {
        if (plan_.offloads_graphs) return tell(Operation::retain, size);
        // The user's forward, and what it leaves behind is not only the outputs but the graph too.
        // What is kept of the outputs is the graph's own tensor.
        const Effect forward = tell(Operation::record, size);
        const int64_t graph = tell(Operation::replay, size).net - tell(Operation::seed, size).net;
        return {forward.rise, forward.net + graph};
      }
      case Operation::advance_retained: {
        const Effect advance = tell({Operation::advance, instruction.segment}, size);
        int64_t graph = tell({Operation::resume, instruction.segment}, size).net -
                        tell({Operation::seed, instruction.segment}, size).net;
        const bool goes_on = instruction.segment + 1 < plan_.segments;
        if (goes_on) graph -= shared(instruction.segment, index, size);
        return {std::max(advance.rise, advance.net + graph), advance.net + graph};
      }
      case Operation::resume:
        if (retained && advances(instruction.segment)) return {};
        return tell({Operation::resume, instruction.segment}, size);
      case Operation::replay:
        return retained && !plan_.offloads_graphs ? Effect() : tell(Operation::replay, size);
      case Operation::free: {
        // While measuring, what stood for the outputs' gradient was freed here too, as the gradient
        // itself is where it was offloaded.
        Effect effect = tell({Operation::free, instruction.segment}, size);
        if (plan_.strategy == "stream" || outputs_offload_) return effect;
        effect.net += tell({Operation::seed, instruction.segment}, size).net;
        const bool beside_graph = retained && instruction.segment > 0;
        if (beside_graph) effect.net += shared(instruction.segment - 1, index, size);
        return effect;
      }
      case Operation::restore:
      case Operation::prefetch: {
        // The outputs' gradient comes with what waits; while measuring, its stand-in came later.
        const Effect effect = tell(restoring(instruction), size);
        if (!outputs_offload_ || !instruction.back) return effect;
        const int64_t gradient = tell({Operation::seed, instruction.segment}, size).net;
        return {std::max(effect.rise, effect.net + gradient), effect.net + gradient};
      }
      case Operation::backward: {
        const Effect effect = tell({Operation::backward, instruction.segment}, size);
        if (plan_.strategy != "stream") first_ = false;
        return effect;
      }
      default:
        return tell(Step(instruction), size);
    }
  }

  /// What all micro-batches do together at a cut: with the rows of all of them.
  Effect at_cut(const Instruction& instruction) {
    // The first of the next segment's gradients make buffers of their own.
    if (instruction.operation == Operation::combine_gradients) first_ = true;
    again_ = false;
    const double rows = static_cast<double>(plan_.batch_size) / profile_.micro_batches();
    return tell({instruction.operation, instruction.segment}, {rows, rows_at(plan_, 0).length});
  }

  /// The next micro-batch of a streaming plan: its gradients find buffers.
  void next_micro_batch(int64_t index) {
    if (plan_.strategy == "stream" && index > 0) first_ = false;
  }

 private:
  /// A separable loss goes through the last segment once, forward and backward.
  bool advances(int64_t segment) const { return segment + 1 < plan_.segments || whole_loss_; }

  /// Bytes that a micro-batch saves at the cut behind a segment, and that the segment's graph holds
  /// where it is kept: they are there once, and until that graph goes. Whoever advances leaves
  /// them, beside what is there once (where a draw begins); whoever frees the next segment lets go
  /// of them, beside what that segment has made.
  int64_t shared(int64_t segment, int64_t index, const RowsAtLength& size) {
    const bool noted = std::exchange(again_, index > 0);
    const int64_t left = tell({Operation::advance, segment}, size).net;
    const int64_t freed = -tell({Operation::free, segment + 1}, size).net -
                          tell({Operation::seed, segment + 1}, size).net;
    again_ = noted;
    return std::max<int64_t>(0, std::min(left, freed));
  }

  /// Copies beside compute take what copies in turn do.
  static Step restoring(const Instruction& instruction) {
    Step step(instruction);
    if (step.operation == Operation::prefetch) step.operation = Operation::restore;
    return step;
  }

  /// Whether another micro-batch of the plan has done the same.
  void note(const Instruction& instruction) {
    Step step = restoring(instruction);
    Operation& operation = step.operation;
    if (operation == Operation::retain && !plan_.offloads_graphs) operation = Operation::record;
    if (operation == Operation::advance_retained) operation = Operation::advance;
    again_ = !done_.insert({operation, step.segment, step.back}).second;
  }

  Effect tell(Step step, RowsAtLength size) {
    step.again = again_;
    const auto key = std::make_tuple(step.operation, step.segment, step.back, again_, size, first_);
    auto found = known_.find(key);
    if (found == known_.end()) {
      found = known_.emplace(key, profile_.effect(step, size, first_)).first;
    }
    return found->second;
  }

  const Plan& plan_;
  const MicroBatchProfile& profile_;
  bool whole_loss_;
  bool outputs_offload_;
  bool first_;
  bool again_ = false;
  std::set<std::tuple<Operation, int64_t, bool>> done_;
  std::map<std::tuple<Operation, int64_t, bool, bool, RowsAtLength, bool>, Effect> known_;
};

}  // namespace

int64_t outputs_of(const MicroBatchProfile& profile, const Plan& plan, size_t index) {
  return profile.effect(seed_of_outputs(plan), rows_at(plan, index), /*first=*/true).net;
}

int64_t largest_joined(const MicroBatchProfile& profile, const Plan& plan) {
  // Each has the rows of all, at the length of the longest, which come first.
  const RowsAtLength all(static_cast<double>(plan.batch_size), rows_at(plan, 0).length);
  const int64_t largest = profile.largest_block(seed_of_outputs(plan), all);
  // Where none wants a gradient they are what a micro-batch leaves.
  return largest > 0 ? largest : profile.largest_left(all);
}

int64_t simulate_peak(const Plan& plan, const MicroBatchProfile& profile, int64_t baseline,
                      bool begun, Effect whole_loss, bool outputs_offload) {
  Effects effects(plan, profile, begun, outputs_offload);
  int64_t live = begun ? baseline + profile.buffer_bytes() : baseline;
  int64_t peak = live;
  for (const Instruction& instruction : plan.instructions) {
    Effect effect;
    if (instruction.operation == Operation::whole_loss) {
      effect = whole_loss;
    } else if (instruction.segment >= 0 && instruction.micro_batch < 0) {
      effect = effects.at_cut(instruction);
    } else if (instruction.micro_batch < 0) {
      continue;
    } else {
      effects.next_micro_batch(instruction.micro_batch);
      effect = effects.of(instruction);
    }
    peak = std::max(peak, live + effect.rise);
    live += effect.net;
  }
  return peak;
}

}  // namespace infinitybatch
