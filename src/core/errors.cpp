#include <infinitybatch/core/errors.hpp>

#include <infinitybatch/core/bytes.hpp>

#include <algorithm>

namespace infinitybatch {
namespace {

/// Nobody means so few bytes: a fraction was meant.
constexpr int64_t kHardlyMeant = 100;

/// What was refused is where the step ended, not all that it needs. Whoever goes by the message
/// should be there in a few raises: a quarter more, and twice the activations that were seen.
std::string larger_budget(int64_t needed, int64_t with_gradients) {
  const int64_t known = std::max(needed, with_gradients);
  const int64_t activations = with_gradients > 0 ? known - with_gradients : 0;
  std::string text = format_bytes_up(known + std::max(known / 4, activations));
  std::erase(text, ' ');
  return "memory_budget=\"" + text + '"';
}

std::string budget_message(int64_t needed, int64_t limit, std::optional<int64_t> smallest,
                           const std::string& what, int64_t with_gradients) {
  std::string way_out = ". Raise it, for example to " + larger_budget(needed, with_gradients) +
                        ", or make the model or a single sample smaller";
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
  const std::string gradients =
      !smallest && with_gradients > needed
          ? ", with the gradients of all parameters " + format_bytes_up(with_gradients)
          : "";
  return what + " needs " + (smallest ? "" : "at least ") +
         (alike ? exactly(needed) : format_bytes_up(needed)) + gradients + "; memory_budget is " +
         (alike ? exactly(limit) : format_bytes(limit)) + way_out;
}

}  // namespace

BudgetExceeded::BudgetExceeded(int64_t needed, int64_t limit,
                               std::optional<int64_t> smallest_feasible,
                               const std::string& what_needs_it, int64_t with_gradients)
    : Error(budget_message(needed, limit, smallest_feasible, what_needs_it, with_gradients)),
      needed_(needed),
      limit_(limit),
      smallest_feasible_(smallest_feasible) {}

}  // namespace infinitybatch
