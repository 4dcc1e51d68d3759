#include <infinitybatch/step/verify.hpp>

#include "core/exchange.hpp"
#include "core/foreign_exception.hpp"
#include "core/in_step.hpp"
#include "core/kept_batch.hpp"
#include "core/out_of_memory.hpp"
#include "core/rng.hpp"
#include "step/admission.hpp"
#include "step/examined_model.hpp"
#include "step/native_loss.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <map>
#include <numeric>

namespace infinitybatch {
namespace {

constexpr double kAllowedInDouble = 1e-12;
constexpr double kNoise = 10;  // times what native moves when the batch is reversed
// Rounding in fp64 moves nobody that far: what does, depends on the order of the samples, or is
// another thing each time.
constexpr double kMoreThanNoise = 1e-8;
constexpr double kTwice = 2;  // times native's own error
constexpr double kRoundings = 8;

using Gradients = std::vector<at::Tensor>;

/// What a step leaves, in the order of `Names`.
struct Found {
  Gradients gradients;
  std::vector<at::Tensor> values;  // of buffers, and of parameters that forward writes
};

/// All that any step leaves something for: forward may make parameters and buffers.
class Names {
 public:
  /// \returns tensors in this order; undefined where there is none of that name
  Gradients sort(const std::vector<NamedParameter>& found) {
    Gradients sorted(names_.size());
    for (const NamedParameter& each : found) {
      const auto [place, anew] = places_.try_emplace(each.name, names_.size());
      if (anew) {
        names_.push_back(each.name);
        sorted.emplace_back();
      }
      sorted[place->second] = each.tensor;
    }
    return sorted;
  }
  /// Of what was sorted before others were known.
  Gradients extend(Gradients sorted) const {
    sorted.resize(names_.size());
    return sorted;
  }
  size_t size() const noexcept { return names_.size(); }
  const std::string& operator[](size_t i) const { return names_[i]; }

 private:
  std::vector<std::string> names_;
  std::map<std::string, size_t> places_;
};

double norm_of(const at::Tensor& tensor) {
  return tensor.defined() ? at::norm(tensor).item<double>() : 0.0;
}

/// A gradient this much smaller than the largest is what rounding leaves of a true zero: of a bias
/// in front of BatchNorm, say, where a few sums cancel.
constexpr double kTrueZero = 1e-12;

/// Gradients that are zero in truth are measured against the largest.
double scale_of(const Gradients& oracle, size_t index) {
  double largest = 0;
  for (const at::Tensor& gradient : oracle) largest = std::max(largest, norm_of(gradient));
  const double own = norm_of(oracle[index]);
  return own > largest * kTrueZero ? own : largest;
}

double error(const Gradients& ours, const Gradients& oracle, size_t index) {
  if (!oracle[index].defined() && !ours[index].defined()) return 0;
  if (!oracle[index].defined() || !ours[index].defined()) return INFINITY;
  if (ours[index].sizes() != oracle[index].sizes()) return INFINITY;
  // Buffers may hold what is no number, or none that can be subtracted.
  if (at::isclose(ours[index], oracle[index], 0, 0, /*equal_nan=*/true).all().item<bool>())
    return 0;
  const double distance = norm_of(ours[index] - oracle[index]);
  const double scale = scale_of(oracle, index);
  if (std::isnan(distance)) return INFINITY;
  return distance == 0 ? 0 : distance / scale;
}

double rounding_of(at::ScalarType type) {
  switch (type) {
    case at::kHalf:
      return 0x1p-10;
    case at::kBFloat16:
      return 0x1p-7;
    case at::kDouble:
      return std::numeric_limits<double>::epsilon();
    default:
      return std::numeric_limits<float>::epsilon();
  }
}

/// The coarsest one that a parameter has.
at::ScalarType own_type_of(const std::vector<NamedParameter>& parameters) {
  if (parameters.empty()) return at::kFloat;
  at::ScalarType coarsest = at::kDouble;
  for (const NamedParameter& parameter : parameters) {
    const at::ScalarType type = c10::toRealValueType(parameter.tensor.scalar_type());
    if (rounding_of(type) > rounding_of(coarsest)) coarsest = type;
  }
  return coarsest;
}

/// False of targets that stand whole beside all samples, which a coupled loss may be given.
bool targets_follow_samples(const BatchSource& targets) {
  const Batch* batch = kept_batch(targets);
  if (batch == nullptr || batch->tensors().empty()) return batch == nullptr;
  const auto stands = [](const Leaf& leaf) {
    return leaf.tensor.defined() && leaf.batch_dim == Leaf::kShared;
  };
  const auto& leaves = batch->leaves();
  const bool unmarked = std::any_of(leaves.begin(), leaves.end(),
                                    [&](const Leaf& leaf) { return stands(leaf) && !leaf.marked; });
  return !unmarked && !std::all_of(leaves.begin(), leaves.end(), [&](const Leaf& leaf) {
    return !leaf.tensor.defined() || stands(leaf);
  });
}

/// One logical batch and one model, looked at in several ways.
class Examination {
 public:
  Examination(const Problem& problem, const Loss& loss, const std::optional<CoupledLoss>& native,
              const Options& options)
      : problem_(problem), loss_(loss), native_(native), options_(options), model_(problem) {}

  VerifyReport run() {
    VerifyReport report;
    report.batch_size = problem_.batch_size();
    report.rows = report.batch_size;
    read(report.rows);
    const Found own_native = native_that_fits(report.rows);
    StepReport step;
    const Found own_ours = ours(options_, step);
    report.micro_batch_sizes = step.micro_batch_sizes;
    report.strategy = step.strategy;
    report.coupled_output = find_coupling();
    if (own_type_ == at::kDouble) {
      report.in_fp64 = against(own_native, own_ours);
      report.own = *report.in_fp64;
      return report;
    }
    Gradients oracle = own_native.gradients;
    try {
      oracle = compare_in_double(step, report);
    } catch (const Error&) {
      throw;
    } catch (const std::exception& failure) {
      keep_foreign_exception(std::current_exception());
      // A Python exception tells its whole traceback.
      const std::string what = failure.what();
      report.why_no_fp64 = what.substr(0, what.find('\n'));
      report.in_fp64.reset();
    }
    compare_own(parameters_.extend(own_ours.gradients), parameters_.extend(own_native.gradients),
                parameters_.extend(oracle), report);
    return report;
  }

 private:
  void read(int64_t rows) {
    inputs_ = to_device(problem_.inputs->rows(0, rows), problem_.device);
    targets_ = to_device(problem_.targets->rows(0, rows), problem_.device);
  }

  Found native(const Batch& inputs, const Batch& targets) {
    const InStep running;
    model_.reset();
    const at::Tensor before = at::globalContext().defaultGenerator(problem_.device).get_state();
    const auto told = tell_foreign_sources();
    const Batch outputs = model_.forward(inputs);
    const at::Tensor after = at::globalContext().defaultGenerator(problem_.device).get_state();
    const bool drawn = !options_.match_native_rng && !at::equal(before, after);
    if (drawn || tell_foreign_sources() != told) {
      throw Unsupported(
          "forward draws random numbers, and micro-batches draw others than the whole batch, so "
          "that their gradients cannot be compared; call eval(), set dropout to 0, or (for torch's "
          "own numbers) use match_native_rng=True, to verify");
    }
    native_loss(loss_, native_, problem_.device, rows_, outputs, targets).backward();
    return found();
  }

  Found found() {
    return {parameters_.sort(model_.take_gradients()), values_.sort(model_.read_values())};
  }

  /// Of as many rows as native has memory for.
  Found native_that_fits(int64_t& rows) {
    for (;;) {
      rows_ = rows;
      try {
        return native(inputs_, targets_);
      } catch (...) {
        keep_foreign_exception(std::current_exception());
        if (!is_out_of_memory(std::current_exception()) || rows < 2 || !in_rows_) throw;
      }
      rows /= 2;
      read(rows);
    }
  }

  Found ours(const Options& options, StepReport& report) {
    model_.reset();
    VirtualBatch batch(*problem_.model, loss_, options);
    model_.watch([&] { report = batch.backward(inputs_, targets_); });
    return found();
  }

  Gradients compare_in_double(const StepReport& step, VerifyReport& report) {
    model_.turn_to_double();
    inputs_ = to_double(inputs_);
    targets_ = to_double(targets_);
    const Found oracle = native(inputs_, targets_);
    // The same micro-batches; they need twice the memory, so that no budget applies.
    Options same = options_;
    same.memory_budget.reset();
    same.micro_batch_size =
        *std::max_element(step.micro_batch_sizes.begin(), step.micro_batch_sizes.end());
    StepReport again;
    const Found found = ours(same, again);
    report.in_fp64 = against(oracle, found);
    return oracle.gradients;
  }

  /// In fp64.
  Comparison against(const Found& oracle, const Found& ours) {
    Comparison comparison;
    comparison.type = at::kDouble;
    std::optional<Found> reversed;
    const auto compare = [&](std::vector<at::Tensor> Found::* what, const Names& names) {
      std::vector<ParameterError> errors;
      const Gradients right = names.extend(oracle.*what);
      const Gradients left = names.extend(ours.*what);
      for (size_t i = 0; i < names.size(); ++i) {
        if (!right[i].defined() && !left[i].defined()) continue;
        ParameterError each{names[i], error(left, right, i), kAllowedInDouble};
        if (each.error > kAllowedInDouble) {
          if (!reversed) {
            check_repeats(oracle.gradients);
            reversed = in_rows_ ? native(reverse(inputs_), reverse(targets_)) : oracle;
          }
          const double moved = error(names.extend(*reversed.*what), right, i);
          if (moved <= kMoreThanNoise) each.allowed = std::max(kAllowedInDouble, kNoise * moved);
        }
        errors.push_back(std::move(each));
      }
      return errors;
    };
    comparison.parameters = compare(&Found::gradients, parameters_);
    comparison.buffers = compare(&Found::values, values_);
    return comparison;
  }

  void check_repeats(const Gradients& oracle) {
    const Gradients again = parameters_.extend(native(inputs_, targets_).gradients);
    for (size_t i = 0; i < oracle.size(); ++i) {
      const double moved = error(again, oracle, i);
      if (moved <= kMoreThanNoise) continue;
      char text[32];
      std::snprintf(text, sizeof text, "%.2g", moved);
      throw Unsupported(
          std::string("native is not repeatable: on the same batch, from the same parameters, "
                      "buffers and default random state, the gradient of ") +
          parameters_[i] + " moved by " + text +
          " of its norm, so that there is nothing to compare with; forward or the loss draws from "
          "a "
          "generator of its own (a torch.Generator, numpy.random.default_rng()) or keeps state "
          "that "
          "is no buffer: seed it in forward, or leave it out, to verify");
    }
  }

  void compare_own(const Gradients& ours, const Gradients& native, const Gradients& oracle,
                   VerifyReport& report) const {
    report.own.type = own_type_;
    for (size_t i = 0; i < ours.size(); ++i) {
      if (!native[i].defined() && !ours[i].defined()) continue;
      const double allowed =
          std::max(kTwice * error(native, oracle, i), kRoundings * rounding_of(own_type_));
      report.own.parameters.push_back({parameters_[i], error(ours, oracle, i), allowed});
    }
  }

  Batch reverse(const Batch& batch) const {
    std::vector<int64_t> order(static_cast<size_t>(rows_));
    std::iota(order.rbegin(), order.rend(), 0);
    return exchanged(batch, order);
  }

  /// The model itself runs on exchanged samples, where a step plays its tape: what the host reads,
  /// and code that no tape can hold, is looked at too.
  std::optional<std::string> find_coupling() {
    const std::optional<Exchanges> exchanges = exchanges_of(inputs_, rows_);
    if (!exchanges) return std::nullopt;
    const at::NoGradGuard no_grad;
    const InStep running;
    const auto forward = [&](const Batch& inputs) {
      model_.reset();
      return model_.forward(inputs);
    };
    const Batch as_is = forward(inputs_);
    const Batch others = forward(exchanged(inputs_, exchanges->others));
    const Batch itself = forward(exchanged(inputs_, exchanges->itself));
    for (size_t i = 0; i < as_is.leaves().size(); ++i) {
      const at::Tensor& tensor = as_is.leaves()[i].tensor;
      if (!tensor.defined() || i >= others.leaves().size() || i >= itself.leaves().size()) continue;
      const auto sizes = tensor.sizes();
      if (std::find(sizes.begin(), sizes.end(), rows_) == sizes.end()) continue;
      if (mixes(differences(tensor, others.leaves()[i].tensor, rows_),
                differences(tensor, itself.leaves()[i].tensor, rows_), sizes, *exchanges)) {
        return "outputs" + as_is.structure()->leaf_name(i);
      }
    }
    return std::nullopt;
  }

  const Problem& problem_;
  const Loss& loss_;
  const std::optional<CoupledLoss>& native_;
  const Options& options_;
  const at::ScalarType own_type_ = own_type_of(problem_.parameters);
  /// Whether fewer samples, in another order, have targets that belong to them.
  const bool in_rows_ = targets_follow_samples(*problem_.targets);
  ExaminedModel model_;
  Names parameters_;
  Names values_;
  Batch inputs_;
  Batch targets_;
  int64_t rows_ = 0;
};

}  // namespace

VerifyReport verify(const Model& model, const Loss& loss, const BatchSource& inputs,
                    const BatchSource& targets, Options options,
                    const std::optional<CoupledLoss>& native) {
  refuse_batch_dim(options.batch_dim);
  options.on_micro_batch = nullptr;
  options.loss_scale = nullptr;
  options.keep_outputs = false;
  const BatchSource beside = targets_for(loss, targets, inputs.size);
  const Problem problem = admitted(model, loss, inputs, beside);
  return Examination(problem, loss, native, options).run();
}

VerifyReport verify(const Model& model, const Loss& loss, const Batch& inputs, const Batch& targets,
                    Options options, const std::optional<CoupledLoss>& native) {
  const Sources sources =
      sources_of(inputs, targets, std::exchange(options.batch_dim, std::nullopt), loss);
  return verify(model, loss, sources.inputs, sources.targets, std::move(options), native);
}

}  // namespace infinitybatch
