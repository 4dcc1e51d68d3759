#include <infinitybatch/execute/plan.hpp>

#include <infinitybatch/core/bytes.hpp>
#include <infinitybatch/core/counted.hpp>

#include <algorithm>
#include <cstdio>
#include <numeric>

namespace infinitybatch {

const char* name_of(Operation operation) {
  switch (operation) {
    case Operation::load:
      return "load";
    case Operation::forward:
      return "forward";
    case Operation::loss:
      return "loss";
    case Operation::backward:
      return "backward";
    case Operation::record:
      return "record";
    case Operation::retain:
      return "retain";
    case Operation::whole_loss:
      return "loss of all";
    case Operation::replay:
      return "replay";
    case Operation::seed:
      return "seed";
    case Operation::advance:
      return "advance";
    case Operation::advance_retained:
      return "advance, keeping the graph";
    case Operation::combine:
      return "combine";
    case Operation::resume:
      return "resume";
    case Operation::combine_gradients:
      return "combine gradients";
    case Operation::restore:
    case Operation::restore_back:
      return "restore";
    case Operation::prefetch:
    case Operation::prefetch_back:
      return "prefetch";
    case Operation::start_offload:
    case Operation::start_offload_back:
      return "start offload";
    case Operation::finish_offload:
    case Operation::finish_offload_back:
      return "finish offload";
    case Operation::free:
      return "free";
    case Operation::penalty:
      return "penalty";
    case Operation::hand_out:
      return "hand out";
  }
  return "?";
}

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

bool Plan::computes_whole_loss() const {
  return std::any_of(instructions.begin(), instructions.end(), [](const Instruction& instruction) {
    return instruction.operation == Operation::whole_loss;
  });
}

int64_t Plan::micro_batch_size() const {
  return micro_batch_sizes.empty()
             ? 0
             : *std::max_element(micro_batch_sizes.begin(), micro_batch_sizes.end());
}

std::string format_seconds(double value) {
  char text[32];
  std::snprintf(text, sizeof text, value < 1 ? "%.3g ms" : "%.3g s",
                value < 1 ? value * 1e3 : value);
  return text;
}

namespace {

std::string describe(const CopySeconds& copies) {
  return "copies took " + format_seconds(copies.hidden + copies.waited) + ", " +
         format_seconds(copies.hidden) + " hidden behind compute and " +
         format_seconds(copies.waited) + " not";
}

/// "4 × 64 + 1 × 44": runs of equal sizes.
std::string describe_sizes(const std::vector<int64_t>& sizes) {
  std::string text;
  for (size_t i = 0; i < sizes.size();) {
    size_t end = i;
    while (end < sizes.size() && sizes[end] == sizes[i]) ++end;
    text +=
        (text.empty() ? "" : " + ") + std::to_string(end - i) + " × " + std::to_string(sizes[i]);
    i = end;
  }
  return text;
}

std::string row(const Candidate& candidate, bool chosen) {
  char text[128];
  std::snprintf(
      text, sizeof text, "%s %10lld  %12s  %12s  %s\n", chosen ? "*" : " ",
      static_cast<long long>(candidate.micro_batch_size),
      format_bytes(candidate.peak_bytes).c_str(),
      candidate.seconds_per_sample ? format_seconds(*candidate.seconds_per_sample).c_str() : "-",
      candidate.feasible ? "fits" : "too large");
  return text;
}

std::string each_whole_batch_op(int64_t ops) {
  return each_of(ops, "op that sees the whole batch", "ops that see the whole batch");
}

}  // namespace

std::string Plan::explain() const {
  std::string text = "strategy " + strategy + ": " + std::to_string(batch_size) + " samples as " +
                     describe_sizes(micro_batch_sizes) + "\n";
  if (strategy == "stream") {
    text += "instructions for each micro-batch: ";
    for (const Operation operation : stream_operations())
      text += std::string(name_of(operation)) + ", ";
    text += "then hand out once\n";
  } else if (strategy == "cut") {
    text += "instructions: record each micro-batch; all of them advance to " +
            each_whole_batch_op(segments - 1) +
            ", then it combines; backward in the same way, last segment first (" +
            std::to_string(retained) + " of " + std::to_string(micro_batch_sizes.size()) +
            " keep their graph); then hand out once\n";
  } else if (strategy == "checkpoint") {
    const bool coupled = computes_whole_loss();
    const auto ops =
        std::count_if(instructions.begin(), instructions.end(),
                      [](const Instruction& each) { return each.operation == Operation::combine; });
    const bool together = coupled || ops > 0;
    text += std::string("instructions") +
            (together ? ": record" : " for each micro-batch: record") +
            (together ? " each micro-batch" : "") + "; its tape is cut into " +
            std::to_string(segments) + " segments; then";
    if (ops > 0) {
      text += " forward to " + each_whole_batch_op(ops) + " and to the end;";
    }
    text += (coupled ? std::string(" the loss of all, and") : std::string()) +
            (ops > 0 ? " back in the same way" : "") +
            (together ? " micro-batch by micro-batch" : "") +
            ", last segment first: resume, backward, free; hand out once\n";
  } else {
    text +=
        "instructions: record each micro-batch (" + std::to_string(retained) + " of " +
        std::to_string(micro_batch_sizes.size()) + " keep their graph" +
        (offloads_graphs ? ", " + std::to_string(offloaded_graphs()) + " of these offloaded" : "") +
        "), loss of all, then last to first: replay, backward, free; then hand out once\n";
  }
  if (budget_bytes) text += "budget " + format_bytes(*budget_bytes) + "; ";
  text += "live before the step " + format_bytes(baseline_bytes);
  if (predicted_peak_bytes) text += "; predicted peak " + format_bytes(*predicted_peak_bytes);
  if (predicted_seconds) text += "; predicted time " + format_seconds(*predicted_seconds);
  text += "\n";
  if (offloads) {
    text += "what waits is offloaded to host or disk, " +
            std::string(overlaps ? "and copied while other micro-batches, or segments, compute"
                        : offloads_graphs ? "in turn"
                                          : "in turn: there is no room for copies beside compute") +
            ": " + format_bytes(offloaded_bytes) +
            " left the device, and came back, in the last step";
    if (offloads_graphs) {
      text += ", of these " + format_bytes(graph_bytes.offloaded) + " of " +
              std::to_string(offloaded_graphs()) + (offloaded_graphs() == 1 ? " graph" : " graphs");
      if (graph_bytes.stayed > 0) {
        text += " (" + format_bytes(graph_bytes.stayed) +
                " that Python holds as well, or that is foreign, stayed)";
      }
    }
    text += "; " + describe(offload_seconds);
    if (predicted_offload_seconds) {
      text += "; predicted for the next: " + describe(*predicted_offload_seconds);
    }
    text += "\n";
  }
  if (!reason.empty()) text += "why: " + reason + "\n";
  if (!candidates.empty()) text += "  micro-batch          peak    per sample\n";
  const int64_t chosen = micro_batch_size();
  const Candidate* nearest = nullptr;
  for (const Candidate& candidate : candidates) {
    if (candidate.micro_batch_size >= chosen && nearest == nullptr) nearest = &candidate;
  }
  for (const Candidate& candidate : candidates) text += row(candidate, &candidate == nearest);
  return text;
}

}  // namespace infinitybatch
