#include <infinitybatch/core/errors.hpp>

#include <infinitybatch/core/bytes.hpp>

namespace infinitybatch {
namespace {

/// Nobody means so few bytes: a fraction was meant.
constexpr int64_t kHardlyMeant = 100;

std::string budget_message(int64_t needed, int64_t limit, std::optional<int64_t> smallest,
                           const std::string& what) {
  std::string way_out = ". Raise memory_budget, or make the model or a single sample smaller";
  if (limit <= kHardlyMeant) {
    way_out += "; " + std::to_string(limit) +
               ", a whole number, is bytes: memory_budget=1.0 is all of the device, 0.5 half of it";
  }
  // How much more nobody knows: the device has refused it.
  if (!smallest && needed <= limit + 1) {
    return what + " needs more than the memory_budget of " + format_bytes(limit) + way_out;
  }
  // A figure that rounds to the budget's own would say nothing.
  const bool alike = format_bytes_up(needed) == format_bytes(limit);
  const auto exactly = [](int64_t bytes) { return std::to_string(bytes) + " bytes"; };
  if (smallest) way_out = ". The smallest that works: memory_budget=" + std::to_string(*smallest);
  return what + " needs " + (smallest ? "" : "at least ") +
         (alike ? exactly(needed) : format_bytes_up(needed)) + "; memory_budget is " +
         (alike ? exactly(limit) : format_bytes(limit)) + way_out;
}

}  // namespace

BudgetExceeded::BudgetExceeded(int64_t needed, int64_t limit,
                               std::optional<int64_t> smallest_feasible,
                               const std::string& what_needs_it)
    : Error(budget_message(needed, limit, smallest_feasible, what_needs_it)),
      needed_(needed),
      limit_(limit),
      smallest_feasible_(smallest_feasible) {}

}  // namespace infinitybatch
