#include "coupled/provisional_run.hpp"

#include "core/exception_text.hpp"
#include "core/foreign_exception.hpp"
#include "core/out_of_memory.hpp"
#include "core/rng.hpp"
#include "coupled/provisional.hpp"
#include "coupled/row_errors.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Context.h>
#include <ATen/Functions.h>

#include <algorithm>
#include <exception>
#include <map>
#include <optional>
#include <string>
#include <utility>

namespace infinitybatch::coupled {
namespace {

constexpr const char* kOp = "infinitybatch::across_batch";

/// Torch's default generators: the CPU's, and those of the devices that the inputs lie on.
class DefaultGenerators {
 public:
  explicit DefaultGenerators(const std::vector<at::Tensor>& inputs) {
    add(at::kCPU);
    for (const at::Tensor& input : inputs) add(input.device());
  }

  bool moved() const {
    return std::any_of(states_.begin(), states_.end(), [](const auto& each) {
      return !at::equal(each.second, state_of(each.first));
    });
  }

  void put_back() const {
    for (const auto& [generator, state] : states_) set_state(generator, state);
  }

 private:
  void add(at::Device device) {
    const at::Generator& generator = at::globalContext().defaultGenerator(device);
    for (const auto& known : states_) {
      if (known.first == generator) return;
    }
    states_.emplace_back(generator, state_of(generator));
  }

  std::vector<std::pair<at::Generator, at::Tensor>> states_;
};

/// As many rows as `samples` of them would have; nothing where that cannot be told.
std::optional<std::vector<at::Tensor>> repeated(const std::vector<at::Tensor>& inputs,
                                                const PartOfBatch::Facts& part, int64_t samples,
                                                bool disturbed) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& input : inputs) {
    const int64_t rows = input.size(0);
    if (rows == 0 || rows % part.rows != 0) return std::nullopt;
    const int64_t wanted = rows / part.rows * samples;
    const auto places = at::TensorOptions().dtype(at::kLong).device(input.device());
    at::Tensor more = input.index_select(0, at::arange(wanted, places).remainder_(rows));
    if (disturbed && more.is_floating_point()) {
      const auto numbers = at::TensorOptions().dtype(at::kFloat).device(input.device());
      const at::Tensor waves =
          at::arange(more.numel(), numbers).mul_(12.9898).sin_().view(more.sizes());
      more = more + waves.to(more.scalar_type()) * (more.detach().abs().amax() + 1);
    }
    all.push_back(std::move(more));
  }
  return all;
}

/// Throws on what has to end the step.
void look_at(const std::exception_ptr& error) {
  if (!is_out_of_memory(error) && may_be_of_rows(error)) return;
  keep_foreign_exception(error);
  std::rethrow_exception(error);
}

bool is_own(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error&) {
    return true;
  } catch (...) {
    return false;
  }
}

at::Tensor first_that_works(const std::function<at::Tensor(const std::vector<at::Tensor>&)>& run,
                            const std::vector<at::Tensor>& inputs, const PartOfBatch::Facts& part) {
  std::exception_ptr error;
  // Statistics of a single sample mean nothing: it warns of them, or fails.
  for (int64_t samples = std::max<int64_t>(2, part.rows);;
       samples = std::min(2 * samples, part.total)) {
    for (const bool disturbed : {false, true}) {
      if (disturbed && samples < part.total) continue;
      try {
        const bool more = samples != part.rows || disturbed;
        const auto all = more ? repeated(inputs, part, samples, disturbed) : std::nullopt;
        if (!all) return run(inputs);
        return run(*all).narrow(0, 0, inputs.front().size(0)).clone();
      } catch (...) {
        error = std::current_exception();
      }
      look_at(error);
    }
    if (samples == part.total) break;
  }
  if (is_own(error)) std::rethrow_exception(error);
  throw CouplingError(
      kOp, "the function of across_batch failed (" + first_line_of(error) +
               ") when it ran for the first time: while forward is recorded it is given the " +
               std::to_string(part.rows) + " samples of one micro-batch, repeated up to the " +
               std::to_string(part.total) +
               " of the whole batch, with other values too, for a result of the right shape. Let "
               "it work for any values of that shape, or make the budget large enough for "
               "one micro-batch, which is given to it as it is");
}

}  // namespace

bool ProvisionalRun::at_work() noexcept {
  return ThreadContext::get().provisional;
}

at::Tensor run_provisionally(const std::function<at::Tensor(const std::vector<at::Tensor>&)>& run,
                             const std::vector<at::Tensor>& inputs,
                             const PartOfBatch::Facts& part) {
  const ProvisionalRun at_work;
  const DefaultGenerators generators(inputs);
  std::optional<std::map<std::string, std::string>> told;
  if (part.native_draws) told = tell_foreign_sources();
  at::Tensor result = first_that_works(run, inputs, part);
  const bool moved = generators.moved();
  if (part.native_draws && (moved || tell_foreign_sources() != *told)) {
    throw CouplingError(kOp,
                        "the function of across_batch draws random numbers, which "
                        "match_native_rng does not follow into it; draw in forward and give the "
                        "numbers to across_batch as an input, or leave match_native_rng out");
  }
  if (moved) generators.put_back();
  // A function that works in place may return what it was given.
  const bool shared = std::any_of(inputs.begin(), inputs.end(), [&](const at::Tensor& input) {
    return input.is_alias_of(result);
  });
  return shared ? result.clone() : result;
}

}  // namespace infinitybatch::coupled
