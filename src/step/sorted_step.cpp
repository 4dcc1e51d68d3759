// A step on rows that are sorted by length, and what is learned of such rows.
#include "core/pinned_copies.hpp"
#include "execute/findings.hpp"
#include "execute/forwards.hpp"
#include "execute/relative_distance.hpp"
#include "execute/row_checks.hpp"
#include "step/admission.hpp"
#include "step/sorted_batch.hpp"
#include "step/sorted_source.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <sstream>
#include <string>
#include <utility>

namespace infinitybatch {
namespace {

/// The loss finds out as its gradient comes: forward's values are given as they are.
void watch_padding(const std::shared_ptr<const Trimming>& trimming, const Batch& outputs,
                   std::optional<Rows> rows) {
  if (!at::GradMode::is_enabled()) return;
  for (size_t i = 0; i < outputs.leaves().size(); ++i) {
    const Leaf& leaf = outputs.leaves()[i];
    if (!leaf.tensor.defined() || !leaf.tensor.requires_grad()) continue;
    if (!trimming->pads(i)) continue;
    leaf.tensor.register_hook([trimming, i, dim = leaf.batch_dim, rows](const at::Tensor& given) {
      trimming->check_gradient(i, dim, given, rows);
    });
  }
}

Loss in_callers_order(const Loss& loss, const std::shared_ptr<Trimming>& trimming) {
  if (const auto* separable = std::get_if<SeparableLoss>(&loss)) {
    const auto sum = [own = *separable, trimming](const Batch& outputs, const Batch& targets) {
      watch_padding(trimming, outputs, trimming->at_work);
      return own.sum(outputs, targets);
    };
    const auto denominator = [own = *separable](const Batch& targets, int64_t samples) {
      return own.denominator(targets, samples);
    };
    SeparableLoss made(separable->name(), sum, denominator);
    if (!separable->has_penalty()) return made;
    return made.with_penalty([own = *separable] { return own.penalty(); });
  }
  const auto& coupled = std::get<CoupledLoss>(loss);
  const auto value = [coupled, trimming](const Batch& outputs, const Batch& targets) {
    watch_padding(trimming, outputs, std::nullopt);
    return coupled.value(trimming->unsorted(outputs), trimming->unsorted(targets));
  };
  return CoupledLoss(coupled.name(), value, coupled.device());
}

std::optional<double> number_of(const DenominatorPart& part) {
  if (const double* number = std::get_if<double>(&part)) return *number;
  if (const at::Tensor* tensor = std::get_if<at::Tensor>(&part)) {
    return tensor->to(at::kCPU, at::kDouble).reshape({}).item<double>();
  }
  return std::nullopt;
}

std::string in_words(double apart) {
  if (!std::isfinite(apart)) return "";
  std::ostringstream text;
  text << " (by " << apart << " relative)";
  return text.str();
}

/// One row beside the same row without its padding.
class OneRow {
 public:
  OneRow(const Setup& setup, const Trimming& trimming, const Trimming::Sequence& sequence,
         int64_t row)
      : setup_(setup),
        trimming_(trimming),
        sequence_(sequence),
        row_(row),
        length_(trimming.length(sequence, {row, row + 1})) {}

  /// Along which dimensions outputs are trimmed. \throws BatchError
  std::vector<Trimming::Along> compare() {
    Forwards forwards(setup_, [] {});
    RowChecks checks(setup_, forwards);
    const Problem& problem = setup_.problem;
    const Batch in_full = problem.inputs->rows(row_, row_ + 1);
    const auto run = [&](const Batch& inputs) {
      return *checks.try_forward(to_device(detached(inputs), problem.device), 1);
    };
    const TrialOutputs whole = run(in_full);
    const TrialOutputs part = run(trimming_.inputs(in_full, sequence_, length_));
    // Numbers that nobody has fixed are others.
    const bool told = !whole.strayed && !part.strayed && whole.foreign == part.foreign;
    const auto& there = whole.outputs.leaves();
    const auto& here = part.outputs.leaves();
    if (here.size() != there.size()) refuse("forward gives other outputs", "");
    std::vector<Trimming::Along> along;
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < here.size(); ++i) {
      if (!here[i].tensor.defined() || !there[i].tensor.defined()) continue;
      const at::Tensor expected = as_long(there[i].tensor, here[i].tensor, i, along);
      const double apart = relative_distance(here[i].tensor, expected);
      if (!told || apart <= kRoundings * rounding_of(expected)) continue;
      refuse("outputs" + part.outputs.structure()->leaf_name(i) + " differ", in_words(apart));
    }
    if (told) compare_losses(whole.outputs, part.outputs);
    return along;
  }

 private:
  // Sums over fewer zeros are added up in another order.
  static constexpr double kRoundings = 4;

  /// What is left of an output in full along the dimensions in which the other one is shorter.
  at::Tensor as_long(at::Tensor whole, const at::Tensor& part, size_t leaf,
                     std::vector<Trimming::Along>& along) const {
    for (int64_t dim = 0; dim < part.dim() && part.dim() == whole.dim(); ++dim) {
      if (part.size(dim) == whole.size(dim)) continue;
      if (part.size(dim) != length_ || whole.size(dim) != sequence_.full) {
        std::ostringstream text;
        text << "outputs" << leaf << " have the shapes " << part.sizes() << " and "
             << whole.sizes();
        refuse(text.str(), "");
      }
      along.push_back({leaf, dim});
      whole = whole.narrow(dim, sequence_.left ? sequence_.full - length_ : 0, length_);
    }
    return whole;
  }

  void compare_losses(const Batch& whole, const Batch& part) const {
    const SeparableLoss* loss = setup_.problem.loss.separable();
    if (loss == nullptr || sequence_.targets.empty()) return;
    const Batch targets = setup_.problem.targets->rows(row_, row_ + 1);
    const Batch trimmed = trimming_.targets(targets, {row_, row_ + 1});
    const auto of = [&](const Batch& outputs, const Batch& beside) {
      return loss->sum(outputs, to_device(beside, setup_.problem.device)).detach().reshape({});
    };
    if (trimming_.sequences.size() > 1) return;  // of the others the outputs are in full
    const at::Tensor in_full = of(whole, targets);
    const double apart = relative_distance(of(part, trimmed), in_full);
    if (apart > kRoundings * rounding_of(in_full)) refuse("its loss differs", in_words(apart));
  }

  [[noreturn]] void refuse(const std::string& what, const std::string& how_far) const {
    throw BatchError("trim=: of sample " +
                     std::to_string(trimming_.order[static_cast<size_t>(row_)]) + ", trimmed to " +
                     std::to_string(length_) + " of " + std::to_string(sequence_.full) +
                     " positions, " + what + how_far +
                     " from what it gives in full: the model, or the loss, takes something from "
                     "padded positions. Give the model the mask (attention_mask=), position_ids "
                     "where padding stands in front, a mask that marks padding alone, or leave "
                     "trim out");
  }

  const Setup& setup_;
  const Trimming& trimming_;
  const Trimming::Sequence& sequence_;
  int64_t row_;
  int64_t length_;
};

/// All rows of one side of a step, or what their lengths need of them.
class Surveyed {
 public:
  Surveyed(const Options& options, const BatchSource& source, bool reads_parts, bool targets) {
    const bool masked = std::all_of(options.trim.begin(), options.trim.end(),
                                    [](const TrimPadding& each) { return !each.mask.empty(); });
    if (reads_parts && masked && !keeps_rows(source)) {
      const auto tells = [&](const Batch& batch, size_t leaf) {
        return tells_lengths(options, batch, leaf, targets);
      };
      std::optional<Batch> found = survey(source, tells);
      in_parts_ = found.has_value();
      if (found) batch_ = *std::move(found);
    }
    if (!in_parts_) batch_ = source.rows(0, source.size);
  }

  const Batch& batch() const noexcept { return batch_; }
  /// Whether rows are to be read as they are asked for.
  bool in_parts() const noexcept { return in_parts_; }
  Dims dims() const { return dims_of(batch_); }

 private:
  Batch batch_;
  bool in_parts_ = false;
};

}  // namespace

SortedStep::SortedStep(const Options& options, const Loss& loss, const BatchSource& inputs,
                       const BatchSource& targets, bool reads_parts)
    : loss_(loss) {
  if (inputs.size != targets.size) {  // for somebody else to refuse
    inputs_ = inputs;
    targets_ = targets;
    return;
  }
  const Surveyed all(options, inputs, reads_parts, /*targets=*/false);
  const Surveyed beside(options, targets, reads_parts, /*targets=*/true);
  trimming_ = trimming_of(options, all.batch(), beside.batch());
  for (const Leaf& leaf : all.batch().leaves()) {
    if (!leaf.tensor.defined() || !leaf.tensor.requires_grad()) continue;
    throw InvalidArgument(
        "trim= sorts copies of the inputs, and one of them requires grad, which would not reach "
        "the caller's; detach it, or leave trim out");
  }
  inputs_ = all.in_parts() ? sorted_rows(inputs, all.dims(), trimming_)
                           : BatchSource::from(trimming_->sorted(all.batch()), "inputs");
  targets_ = beside.in_parts() ? sorted_rows(targets, beside.dims(), trimming_)
                               : targets_source(trimming_->sorted(beside.batch()), inputs_.size, loss);
  loss_ = in_callers_order(loss, trimming_);
  const bool cuts_targets =
      std::any_of(trimming_->sequences.begin(), trimming_->sequences.end(),
                  [](const Trimming::Sequence& sequence) { return !sequence.targets.empty(); });
  if (cuts_targets && std::holds_alternative<CoupledLoss>(loss)) {
    throw InvalidArgument(
        "trim= trims targets (targets=True, or a mask among them), which a loss of all outputs "
        "sees in full, with outputs padded back; leave targets=True out");
  }
  if (cuts_targets) check_denominator();
}

void SortedStep::check_denominator() const {
  const at::NoGradGuard no_grad;
  const auto& loss = std::get<SeparableLoss>(loss_);
  double in_full = 0;
  double trimmed = 0;
  int64_t row = 0;
  // Before a plan says how rows are split, none may count more than its own.
  const std::vector<int64_t> singles(static_cast<size_t>(targets_.size), 1);
  for (const int64_t size : trimming_->sizes.empty() ? singles : trimming_->sizes) {
    const Batch targets = targets_.rows(row, row + size);
    const auto whole = number_of(loss.denominator(targets, size));
    const auto part =
        number_of(loss.denominator(trimming_->targets(targets, {row, row + size}), size));
    if (!whole || !part) return;  // nothing is divided
    in_full += *whole;
    trimmed += *part;
    row += size;
  }
  constexpr double kRounding = 1e-6;
  if (std::abs(in_full - trimmed) <= kRounding * std::abs(in_full)) return;
  std::ostringstream text;
  text << "the loss divides by " << in_full << " with all targets and by " << trimmed
       << " with those that trim= leaves: it counts positions that are cut off. Mark them in the "
          "targets (-100 with ignore_index=-100), leave targets=True out so that outputs are "
          "padded back, or leave trim out";
  throw BatchError(text.str());
}

std::function<void(const MicroBatch&)> SortedStep::callback(
    const std::function<void(const MicroBatch&)>& given) const {
  return showing_samples(trimming_, given);
}

std::function<void(const MicroBatch&)> showing_samples(
    const std::shared_ptr<const Trimming>& trimming,
    const std::function<void(const MicroBatch&)>& given) {
  if (!given || !trimming) return given;
  return [trimming, given](const MicroBatch& seen) {
    MicroBatch shown = seen;
    shown.samples = trimming->samples({seen.begin, seen.end});
    given(shown);
  };
}

void learn_trimming(const Setup& setup) {
  Trimming& trimming = *setup.problem.trimming;
  auto& known = setup.resources.findings->trimmed_outputs;
  known.resize(trimming.sequences.size());
  Setup plain = setup;  // nothing is padded back
  plain.problem.trimming = nullptr;
  for (size_t i = 0; i < known.size(); ++i) {
    Trimming::Sequence& sequence = trimming.sequences[i];
    const bool compared = known[i] && known[i]->left == sequence.left;
    if (compared) sequence.outputs = known[i];
    if (compared || sequence.inputs.empty()) continue;
    for (const int64_t row : trimming.trimmed_rows(sequence)) {
      std::vector<Trimming::Along> along = OneRow(plain, trimming, sequence, row).compare();
      sequence.outputs = Trimming::Outputs{sequence.left, std::move(along)};
    }
    if (sequence.outputs) known[i] = sequence.outputs;
  }
}

}  // namespace infinitybatch
