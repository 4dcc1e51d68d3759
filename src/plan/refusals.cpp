#include "plan/refusals.hpp"

#include "core/counted.hpp"
#include "plan/prediction.hpp"
#include "plan/probes.hpp"

#include <infinitybatch/core/errors.hpp>

#include <algorithm>
#include <functional>
#include <optional>

namespace infinitybatch::plan {
namespace {

/// What the smallest plan consists of, for people.
std::string smallest_plan(const Request& request) {
  if (!request.two_pass) return "a single sample";
  const std::string all = "all " + std::to_string(request.batch_size);
  if (request.segments < 2) {
    return "a few samples at a time, beside the outputs and the loss of " + all;
  }
  return "a few samples at a time, beside what " + all + " of them leave in front of " +
         each_of(request.segments - 1, "op that sees the whole batch",
                 "ops that see the whole batch") +
         " (BatchNorm in training)";
}

/// What is planned with where no step has ended yet.
Learned before_steps(Learned learned) {
  learned.whole_loss = {};
  learned.steps.clear();
  return learned;
}

/// Of the splits that count, by their size and number of micro-batches: what the step takes, and
/// what it is taken to need where it is the first.
std::optional<int64_t> least_peak(const Request& request, const Learned& learned,
                                  const std::function<bool(int64_t, int64_t)>& counts) {
  const Learned before = request.two_pass ? before_steps(learned) : learned;
  const Prediction first(request, before);
  const Prediction later(request, learned);
  std::optional<int64_t> least;
  for (int64_t cap = 1; cap < 2 * request.whole(); cap *= 2) {
    const int64_t size = request.size_under(cap);
    if (!counts(size, request.count_under(size))) continue;
    least = std::min(least.value_or(INT64_MAX), std::max(first.peak(size), later.peak(size)));
    if (!request.two_pass) break;  // no size is predicted to need less than a smaller one does
  }
  return least;
}

}  // namespace

void refuse(const Request& request, int64_t needed, const std::string& what) {
  const int64_t budget = request.budget_bytes + request.reserved_bytes;
  throw BudgetExceeded(std::max(needed, budget + 1), budget, std::nullopt, what,
                       request.baseline_bytes + request.gradient_bytes);
}

std::optional<int64_t> smallest_budget(const Request& request, const Learned& learned) {
  if (!learned.profile) return std::nullopt;
  const Prediction prediction(request, learned);
  return least_peak(request, learned, [&](int64_t size, int64_t count) {
    const int64_t least = request.packing ? size : request.batch_size / count;
    const bool shown = least >= kSmallProbe * request.unit() || prediction.measured_step(size);
    return shown && (!request.two_pass || prediction.knows_whole_loss(static_cast<size_t>(count)));
  });
}

void refuse_smallest(const Request& request, const Learned& learned, int64_t needed) {
  const int64_t budget = request.budget_bytes + request.reserved_bytes;
  const std::optional<int64_t> smallest = smallest_budget(request, learned);
  if (smallest > budget) throw BudgetExceeded(*smallest, budget, smallest, smallest_plan(request));
  if (learned.profile) {
    const auto any = [](int64_t /*size*/, int64_t /*count*/) { return true; };
    needed = std::max(needed, *least_peak(request, learned, any));
  }
  refuse(request, needed, smallest_plan(request));
}

void refuse_larger(const Request& request, int64_t needed) {
  refuse(request, needed,
         "A micro-batch of more than the " + std::to_string(request.fails_on) +
             " samples on which forward fails");
}

}  // namespace infinitybatch::plan
