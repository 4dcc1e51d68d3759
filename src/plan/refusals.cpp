#include "plan/refusals.hpp"

#include "core/counted.hpp"
#include "plan/prediction.hpp"

#include <infinitybatch/core/errors.hpp>

#include <algorithm>
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

}  // namespace

void refuse(const Request& request, int64_t needed, const std::string& what) {
  const int64_t budget = request.budget_bytes + request.reserved_bytes;
  throw BudgetExceeded(std::max(needed, budget + 1), budget, std::nullopt, what,
                       request.baseline_bytes + request.gradient_bytes);
}

void refuse_smallest(const Request& request, const Learned& learned, int64_t needed) {
  const int64_t budget = request.budget_bytes + request.reserved_bytes;
  if (!learned.profile) refuse(request, needed, smallest_plan(request));
  const Prediction prediction(request, learned);
  int64_t smallest = INT64_MAX;
  for (int64_t cap = 1; cap < 2 * request.whole(); cap *= 2) {
    smallest = std::min(smallest, prediction.peak(request.size_under(cap)));
    if (!request.two_pass) break;  // no size is predicted to need less than one sample does
  }
  if (smallest <= budget && needed != 0) refuse(request, needed, smallest_plan(request));
  const int64_t least = std::max(smallest, budget + 1);
  throw BudgetExceeded(least, budget, least, smallest_plan(request));
}

void refuse_larger(const Request& request, int64_t needed) {
  refuse(request, needed,
         "A micro-batch of more than the " + std::to_string(request.fails_on) +
             " samples on which forward fails");
}

}  // namespace infinitybatch::plan
