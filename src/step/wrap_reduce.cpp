// The part of ForwardPass that tests what an output that is one number is said to be.
#include "step/wrap_forward.hpp"

#include "core/out_of_memory.hpp"
#include "coupled/row_errors.hpp"
#include "execute/moved_values.hpp"
#include "execute/relative_distance.hpp"
#include "execute/row_look.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <string>
#include <utility>

namespace infinitybatch {
namespace {

struct Trial {
  TrialOutputs outputs;
  std::vector<OwnLoss> losses;
};

struct Trials {
  Trial whole, first, second;
  bool finite = true;
};

/// C++ writes the sign of NaN, which means nothing.
std::string number_text(double number) {
  return std::isnan(number) ? "NaN (not a number)" : std::to_string(number);
}

}  // namespace

void ForwardPass::check_reduce(const JoinedOutputs& joined) {
  Executor& engine = call_->run->engine();
  if (row_counts_.size() < 2 || !exact_) return;
  if (call_->findings.reduce_checked && !engine.checks().looked()) return;
  std::vector<size_t> numbers;
  for (size_t i = 0; i < joined.shares.size(); ++i) {
    if (!joined.shares[i].empty()) numbers.push_back(i);
  }
  if (numbers.empty()) return;
  const int64_t total = batch_size(inputs_, "inputs");
  const int64_t all = std::min(total, std::max<int64_t>(2, row_counts_.front()));
  const int64_t half = all / 2;
  const auto number = [](const Trial& trial, size_t i) {
    return trial.outputs.outputs.leaves()[i].tensor;
  };
  const auto attempt = [&](Rows part) -> std::optional<Trial> {
    auto outputs = engine.checks().try_forward(call_->micro_batch(part), part.size());
    if (!outputs || outputs->strayed) return std::nullopt;
    std::vector<OwnLoss> losses = own_losses_.of(outputs->outputs);
    return Trial{std::move(*outputs), std::move(losses)};
  };
  // Nothing where nobody can tell.
  const auto split = [&](int64_t begin) -> std::optional<Trials> {
    auto whole = attempt({begin, begin + all});
    auto first = whole ? attempt({begin, begin + half}) : std::nullopt;
    auto second = first ? attempt({begin + half, begin + all}) : std::nullopt;
    if (!second) return std::nullopt;
    Trials trials{std::move(*whole), std::move(*first), std::move(*second)};
    for (const size_t i : numbers) {
      trials.finite = trials.finite && number(trials.whole, i).isfinite().item<bool>();
    }
    return trials;
  };
  // Of a fresh model's losses one is much like another, and so are their means.
  MovedValues moved(recording_ ? setup_.problem.parameters : std::vector<NamedParameter>(), {},
                    engine.forwards().watch().memory());
  // Samples that weigh alike tell nothing: later steps look elsewhere.
  const int64_t later = std::max<int64_t>(0, call_->findings.rows_seen.steps - 1) * all;
  for (const int64_t place : places_of_looks(total, all)) {
    const int64_t begin = (place + later) % (total - all + 1);
    std::optional<Trials> trials;
    try {
      if (!moved.empty()) moved.on();
      trials = split(begin);
      moved.off();
      if (trials && !trials->finite) trials = split(begin);
    } catch (...) {
      const std::exception_ptr error = std::current_exception();
      moved.off();
      if (!is_out_of_memory(error) && !coupled::may_be_of_rows(error)) throw;
    }
    if (!trials) return;
    for (const size_t i : numbers) {
      const std::vector<OwnLoss> losses{trials->first.losses.at(i), trials->second.losses.at(i)};
      const auto shares = shares_of(losses, {half, all - half}, own_.reduce);
      if (shares.empty()) continue;
      const at::Tensor wanted = number(trials->whole, i);
      const at::Tensor found =
          reduced({number(trials->first, i), number(trials->second, i)}, shares);
      if (relative_distance(wanted, found) <= rounding_of(wanted)) continue;
      const bool sum = own_.reduce == Reduce::sum || losses.front().kind == OwnLoss::Kind::sum;
      const std::string name = sum ? "sum" : "mean";
      throw BatchError("outputs" + joined.whole.structure()->leaf_name(i) + " is not a " + name +
                       " over samples" +
                       (own_.reduce == Reduce::none ? "" : ", as reduce=\"" + name + "\" says") +
                       ": of " + std::to_string(all) + " samples it is " +
                       number_text(wanted.item<double>()) + ", and its two halves give " +
                       number_text(found.item<double>()) +
                       "; return one value for each sample, and let the loss reduce them");
    }
  }
  call_->findings.reduce_checked = true;
}

}  // namespace infinitybatch
