#include <infinitybatch/execute/plan.hpp>

#include "core/counted.hpp"
#include "execute/schedule.hpp"

#include <infinitybatch/core/bytes.hpp>

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
    case Operation::recompute:
      return "recompute";
    case Operation::resume:
      return "resume";
    case Operation::combine_gradients:
      return "combine gradients";
    case Operation::restore:
      return "restore";
    case Operation::prefetch:
      return "prefetch";
    case Operation::start_offload:
      return "start offload";
    case Operation::finish_offload:
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

int64_t Plan::retained_samples() const {
  return std::accumulate(micro_batch_sizes.end() - retained, micro_batch_sizes.end(), int64_t{0});
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

std::string Plan::explain_kept() const {
  if (!kept_boundaries) return "";
  std::string numbers;
  for (const int64_t op : *kept_boundaries) {
    numbers += (numbers.empty() ? "" : ", ") + std::to_string(op);
  }
  return "boundary activations are kept at " +
         (numbers.empty() ? "none" : std::to_string(kept_boundaries->size())) + " of " +
         std::to_string(segments - 1) + " ops that see the whole batch" +
         (numbers.empty() ? "" : " (numbered " + numbers + ")") +
         ", and computed again in front of the others";
}

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
    if (kept_boundaries) text += explain_kept() + "\n";
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
