#include <infinitybatch/core/errors.hpp>

#include <infinitybatch/core/bytes.hpp>

namespace infinitybatch {
namespace {

std::string budget_message(int64_t needed, int64_t limit, std::optional<int64_t> smallest,
                           const std::string& what) {
  const char* const way_out = "raise memory_budget, or make the model or a single sample smaller";
  // How much more nobody knows: the device has refused it.
  if (!smallest && needed <= limit + 1) {
    return what + " needs more than the budget of " + format_bytes(limit) + "; " + way_out;
  }
  // A figure that rounds to the budget's own would say nothing.
  const bool alike = format_bytes(needed) == format_bytes(limit);
  const auto write = [alike](int64_t bytes) {
    return alike ? std::to_string(bytes) + " bytes" : format_bytes(bytes);
  };
  std::string message = what + " needs " + (smallest ? "" : "at least ") + write(needed) +
                        ", the budget is " + write(limit) + "; ";
  if (smallest) return message + "the smallest budget that works is " + write(*smallest);
  return message + way_out;
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
