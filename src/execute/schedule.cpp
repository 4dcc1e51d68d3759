#include "execute/schedule.hpp"

#include <algorithm>
#include <utility>

namespace infinitybatch {

std::vector<int64_t> split_by(int64_t batch_size, int64_t size) {
  std::vector<int64_t> sizes(static_cast<size_t>(batch_size / size), size);
  if (batch_size % size != 0) sizes.push_back(batch_size % size);
  return sizes;
}

std::vector<int64_t> split_evenly(int64_t batch_size, int64_t size) {
  const int64_t count = (batch_size + size - 1) / size;
  std::vector<int64_t> sizes(static_cast<size_t>(count), batch_size / count);
  for (int64_t i = 0; i < batch_size % count; ++i) ++sizes[static_cast<size_t>(i)];
  return sizes;
}

std::vector<int64_t> split_for_cuts(int64_t batch_size, int64_t size) {
  const bool single = size > 2 && batch_size > size && batch_size % size == 1;
  return single ? split_evenly(batch_size, size) : split_by(batch_size, size);
}

const std::vector<Operation>& stream_operations() {
  static const std::vector<Operation> operations{
      Operation::load, Operation::forward, Operation::loss, Operation::backward, Operation::free};
  return operations;
}

const std::vector<Operation>& two_pass_operations() {
  static const std::vector<Operation> operations{
      Operation::record, Operation::replay, Operation::seed, Operation::backward, Operation::free};
  return operations;
}

namespace {

/// `operations` on each micro-batch in turn.
Plan repeat(const std::vector<Operation>& operations, std::vector<int64_t> micro_batch_sizes) {
  Plan plan;
  plan.batch_size = std::accumulate(micro_batch_sizes.begin(), micro_batch_sizes.end(), int64_t{0});
  for (size_t i = 0; i < micro_batch_sizes.size(); ++i) {
    for (const Operation operation : operations) {
      plan.instructions.push_back({operation, static_cast<int64_t>(i)});
    }
  }
  plan.micro_batch_sizes = std::move(micro_batch_sizes);
  return plan;
}

}  // namespace

Plan rehearsal_plan(std::vector<int64_t> micro_batch_sizes, bool offloads_graphs) {
  Plan plan = repeat(two_pass_operations(), std::move(micro_batch_sizes));
  plan.strategy = "rehearsal";
  if (!offloads_graphs) return plan;
  plan.offloads_graphs = true;
  plan.retained = static_cast<int64_t>(plan.micro_batch_sizes.size());
  for (Instruction& instruction : plan.instructions) {
    if (instruction.operation == Operation::record) instruction.operation = Operation::retain;
  }
  return plan;
}

Plan stream_plan(std::vector<int64_t> micro_batch_sizes, bool penalty) {
  Plan plan = repeat(stream_operations(), std::move(micro_batch_sizes));
  plan.strategy = "stream";
  if (penalty) plan.instructions.push_back({Operation::penalty, -1});
  plan.instructions.push_back({Operation::hand_out, -1});
  return plan;
}

Plan two_pass_plan(std::vector<int64_t> micro_batch_sizes, int64_t retained, bool offloads_graphs) {
  Plan plan;
  plan.strategy = "replay";
  plan.retained = retained;
  plan.offloads_graphs = offloads_graphs && retained > 0;
  plan.batch_size = std::accumulate(micro_batch_sizes.begin(), micro_batch_sizes.end(), int64_t{0});
  const auto count = static_cast<int64_t>(micro_batch_sizes.size());
  for (int64_t i = 0; i < count; ++i) {
    plan.instructions.push_back({i < count - retained ? Operation::record : Operation::retain, i});
  }
  plan.instructions.push_back({Operation::whole_loss, -1});
  for (int64_t i = count; i-- > 0;) {
    for (const Operation operation : {Operation::replay, Operation::backward, Operation::free}) {
      plan.instructions.push_back({operation, i});
    }
  }
  plan.instructions.push_back({Operation::hand_out, -1});
  plan.micro_batch_sizes = std::move(micro_batch_sizes);
  return plan;
}

Plan cut_plan(std::vector<int64_t> micro_batch_sizes, int64_t segments, int64_t retained,
              bool coupled, bool penalty) {
  Stretches stretches(static_cast<size_t>(segments));
  std::iota(stretches.begin(), stretches.end(), int64_t{1});
  const std::vector<Stretches> all(micro_batch_sizes.size(), stretches);
  return cut_plan(std::move(micro_batch_sizes), all, retained, coupled, penalty);
}

Plan cut_plan(std::vector<int64_t> micro_batch_sizes, const std::vector<Stretches>& stretches,
              int64_t retained, bool coupled, bool penalty) {
  Plan plan;
  plan.retained = retained;
  plan.batch_size = std::accumulate(micro_batch_sizes.begin(), micro_batch_sizes.end(), int64_t{0});
  const auto count = static_cast<int64_t>(micro_batch_sizes.size());
  const int64_t last = static_cast<int64_t>(stretches.front().size()) - 1;
  for (const Stretches& each : stretches) plan.segments = std::max(plan.segments, each.back());
  plan.strategy = plan.segments > last + 1 ? "checkpoint" : "cut";
  const auto end_of = [&](int64_t i, int64_t stretch) {
    return stretch < 0 ? 0 : stretches[static_cast<size_t>(i)][static_cast<size_t>(stretch)];
  };
  auto& instructions = plan.instructions;
  for (int64_t i = 0; i < count; ++i) instructions.push_back({Operation::record, i});
  const auto advance = [&](int64_t stretch) {
    for (int64_t i = 0; i < count; ++i) {
      const auto operation =
          i >= count - retained ? Operation::advance_retained : Operation::advance;
      for (int64_t s = end_of(i, stretch - 1); s < end_of(i, stretch); ++s) {
        instructions.push_back({operation, i, s});
      }
    }
  };
  for (int64_t stretch = 0; stretch < last; ++stretch) {
    advance(stretch);
    instructions.push_back({Operation::combine, -1, stretch + 1});
  }
  if (coupled) {
    advance(last);
    instructions.push_back({Operation::whole_loss, -1});
  }
  for (int64_t stretch = last; stretch >= 0; --stretch) {
    // A separable loss needs nothing of the whole batch after the last op: forward and backward.
    const bool streams = stretch == last && !coupled;
    for (int64_t k = 0; k < count; ++k) {
      const int64_t i = streams ? k : count - 1 - k;
      const int64_t end = end_of(i, stretch);
      for (int64_t s = end; s-- > end_of(i, stretch - 1);) {
        instructions.push_back({Operation::resume, i, s});
        if (streams && s + 1 == end) instructions.push_back({Operation::loss, i});
        instructions.push_back({Operation::backward, i, s});
        instructions.push_back({Operation::free, i, s});
      }
    }
    if (stretch > 0) instructions.push_back({Operation::combine_gradients, -1, stretch});
  }
  if (penalty) instructions.push_back({Operation::penalty, -1});
  instructions.push_back({Operation::hand_out, -1});
  plan.micro_batch_sizes = std::move(micro_batch_sizes);
  return plan;
}

Plan checkpoint_plan(std::vector<int64_t> micro_batch_sizes, const std::vector<int64_t>& segments,
                     bool coupled, bool penalty) {
  Plan plan;
  plan.strategy = "checkpoint";
  plan.batch_size = std::accumulate(micro_batch_sizes.begin(), micro_batch_sizes.end(), int64_t{0});
  plan.segments = *std::max_element(segments.begin(), segments.end());
  auto& instructions = plan.instructions;
  const auto count = static_cast<int64_t>(micro_batch_sizes.size());
  const auto play = [&](int64_t i) {
    const int64_t last = segments[static_cast<size_t>(i)] - 1;
    for (int64_t segment = last; segment >= 0; --segment) {
      instructions.push_back({Operation::resume, i, segment});
      if (segment == last && !coupled) instructions.push_back({Operation::loss, i});
      instructions.push_back({Operation::backward, i, segment});
      instructions.push_back({Operation::free, i, segment});
    }
  };
  for (int64_t i = 0; i < count; ++i) {
    instructions.push_back({Operation::record, i});
    if (!coupled) play(i);
  }
  if (coupled) {
    instructions.push_back({Operation::whole_loss, -1});
    for (int64_t i = count; i-- > 0;) play(i);
  }
  if (penalty) instructions.push_back({Operation::penalty, -1});
  instructions.push_back({Operation::hand_out, -1});
  plan.micro_batch_sizes = std::move(micro_batch_sizes);
  return plan;
}

Plan cut_rehearsal_plan(std::vector<int64_t> micro_batch_sizes, int64_t segments, bool coupled) {
  Plan plan =
      cut_plan(std::move(micro_batch_sizes), segments, /*retained=*/0, coupled, /*penalty=*/false);
  plan.strategy = "rehearsal";
  std::vector<Instruction> instructions;
  for (const Instruction& instruction : plan.instructions) {
    const bool whole = instruction.operation == Operation::whole_loss ||
                       instruction.operation == Operation::hand_out;
    if (whole) continue;
    instructions.push_back(instruction);
    if (coupled && instruction.operation == Operation::resume &&
        instruction.segment + 1 == segments) {
      instructions.push_back({Operation::seed, instruction.micro_batch, instruction.segment});
    }
  }
  plan.instructions = std::move(instructions);
  return plan;
}

}  // namespace infinitybatch
