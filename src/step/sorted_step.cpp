// A step on rows that are sorted by length, and what is learned of such rows.
#include "core/exception_text.hpp"
#include "core/pinned_copies.hpp"
#include "coupled/row_errors.hpp"
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
#include <iterator>
#include <optional>
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
        length_(trimming.length(sequence, {row, row + 1})),
        in_full_(setup.problem.inputs->rows(row, row + 1)),
        whole_(run(in_full_)) {}

  /// Along which dimensions outputs are trimmed, and what the model gave at padded positions there,
  /// is added to `found`. \throws BatchError
  void compare(Trimming::Outputs& found) {
    const TrialOutputs part = trimmed();
    const std::vector<Trimming::Along> along = compared(part);
    if (told(part)) compare_losses(part.outputs);
    if (found.along != along) found.fills.assign(along.size(), 0);
    found.along = along;
    for (size_t i = 0; i < along.size(); ++i) {
      const double here = padded_value(along[i]);
      if (found.fills[i] == 0 || here > found.fills[i]) found.fills[i] = here;
    }
  }

  /// Whether it shows what needs to be trimmed: one position goes with any number of them.
  bool tells() const noexcept { return length_ > 1; }

  /// Leaves out of the sequence's inputs what is as long by chance: forward gives the same without.
  /// \return false where it gives nothing of the kind, whatever is trimmed
  bool choose(Trimming::Sequence& sequence) {
    std::vector<Trimming::Along> inputs = sequence.inputs;
    if (const auto along = gives_the_same(inputs)) {
      for (const Trimming::Along& each : sequence.unsure) {
        std::vector<Trimming::Along> fewer = without(inputs, {each});
        // What makes outputs as long as it is has time, whoever reads the mask. And a mask alone
        // would be trimmed for nothing.
        if (fewer.size() > 1 && gives_the_same(fewer) == along) inputs = std::move(fewer);
      }
      sequence.inputs = std::move(inputs);
      return true;
    }
    constexpr size_t kMost = 5;
    const size_t unsure = std::min(kMost, sequence.unsure.size());
    for (size_t chosen = 1; chosen < size_t{1} << unsure; ++chosen) {
      std::vector<Trimming::Along> left_out;
      for (size_t i = 0; i < unsure; ++i) {
        if ((chosen >> i & 1) != 0) left_out.push_back(sequence.unsure[i]);
      }
      std::vector<Trimming::Along> fewer = without(inputs, left_out);
      if (fewer.size() < 2 || !gives_the_same(fewer)) continue;
      sequence.inputs = std::move(fewer);
      return true;
    }
    return false;
  }

  /// Where forward gives what it gives in full though these are trimmed: along which dimensions
  /// outputs follow. Nothing where it does not.
  std::optional<std::vector<Trimming::Along>> gives_the_same(
      const std::vector<Trimming::Along>& inputs) const {
    Trimming::Sequence sequence = sequence_;
    sequence.inputs = inputs;
    try {
      return compared(run(Trimming::inputs(in_full_, sequence, length_)));
    } catch (const BatchError&) {
      return std::nullopt;
    } catch (...) {
      // Of what does not go together forward makes what it likes.
      if (!coupled::may_be_of_rows(std::current_exception())) throw;
      return std::nullopt;
    }
  }

 private:
  // Sums over fewer zeros are added up in another order.
  static constexpr double kRoundings = 4;

  TrialOutputs run(const Batch& inputs) const {
    Forwards forwards(setup_, [] {});
    RowChecks checks(setup_, forwards);
    return *checks.try_forward(to_device(detached(inputs), setup_.problem.device), 1);
  }

  TrialOutputs trimmed() const {
    const Batch inputs = Trimming::inputs(in_full_, sequence_, length_);
    if (sequence_.unsure.empty()) return run(inputs);
    try {
      return run(inputs);
    } catch (const Error&) {
      throw;
    } catch (...) {
      const std::exception_ptr error = std::current_exception();
      if (!coupled::may_be_of_rows(error)) throw;
      refuse("forward fails (" + first_line_of(error) + ")", "");
    }
  }

  /// Numbers that nobody has fixed are others.
  bool told(const TrialOutputs& part) const {
    return !whole_.strayed && !part.strayed && whole_.foreign == part.foreign;
  }

  static std::vector<Trimming::Along> without(const std::vector<Trimming::Along>& all,
                                              const std::vector<Trimming::Along>& some) {
    std::vector<Trimming::Along> rest;
    std::copy_if(all.begin(), all.end(), std::back_inserter(rest), [&](const auto& each) {
      return std::find(some.begin(), some.end(), each) == some.end();
    });
    return rest;
  }

  /// Along which dimensions outputs are trimmed. \throws BatchError
  std::vector<Trimming::Along> compared(const TrialOutputs& part) const {
    const auto& there = whole_.outputs.leaves();
    const auto& here = part.outputs.leaves();
    if (here.size() != there.size()) refuse("forward gives other outputs", "");
    std::vector<Trimming::Along> along;
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < here.size(); ++i) {
      if (!here[i].tensor.defined() || !there[i].tensor.defined()) continue;
      const at::Tensor expected = as_long(there[i].tensor, here[i].tensor, i, along);
      const double apart = relative_distance(here[i].tensor, expected);
      if (!told(part) || apart <= kRoundings * rounding_of(expected)) continue;
      refuse("outputs" + part.outputs.structure()->leaf_name(i) + " differ", in_words(apart));
    }
    return along;
  }

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

  /// The largest that the model gave at padded positions; where all are negative, or zero, the
  /// smallest.
  double padded_value(const Trimming::Along& along) const {
    const at::NoGradGuard no_grad;
    const at::Tensor& whole = whole_.outputs.leaves()[along.leaf].tensor;
    if (!whole.is_floating_point()) return 0;
    const int64_t begin = sequence_.left ? 0 : length_;
    const at::Tensor cut = whole.detach().narrow(along.dim, begin, sequence_.full - length_);
    if (cut.numel() == 0) return 0;
    const double most = cut.amax().item<double>();
    const double value = most > 0 ? most : cut.amin().item<double>();
    return std::isfinite(value) ? value : 0;
  }

  void compare_losses(const Batch& part) const {
    const SeparableLoss* loss = setup_.problem.loss.separable();
    if (loss == nullptr || sequence_.targets.empty()) return;
    const Batch targets = setup_.problem.targets->rows(row_, row_ + 1);
    const Batch trimmed = trimming_.targets(targets, {row_, row_ + 1});
    const auto of = [&](const Batch& outputs, const Batch& beside) {
      return loss->sum(outputs, to_device(beside, setup_.problem.device)).detach().reshape({});
    };
    if (trimming_.sequences.size() > 1) return;  // of the others the outputs are in full
    const at::Tensor in_full = of(whole_.outputs, targets);
    const double apart = relative_distance(of(part, trimmed), in_full);
    if (apart > kRoundings * rounding_of(in_full)) refuse("its loss differs", in_words(apart));
  }

  [[noreturn]] void refuse(const std::string& what, const std::string& how_far) const {
    std::string unsure;
    for (const Trimming::Along& each : sequence_.unsure) {
      unsure +=
          (unsure.empty() ? "inputs" : ", inputs") + in_full_.structure()->leaf_name(each.leaf);
    }
    if (!unsure.empty()) {
      unsure = ". Or " + unsure + " of size " + std::to_string(sequence_.full) +
               " are no sequences: name what is, as in "
               "trim_padding(mask=\"attention_mask\", inputs=[\"input_ids\"])";
    }
    throw BatchError("trim=: of sample " +
                     std::to_string(trimming_.order[static_cast<size_t>(row_)]) + ", trimmed to " +
                     std::to_string(length_) + " of " + std::to_string(sequence_.full) +
                     " positions, " + what + how_far +
                     " from what it gives in full: the model, or the loss, takes something from "
                     "padded positions. Give the model the mask (attention_mask=), position_ids "
                     "where padding stands in front, a mask that marks padding alone, or leave "
                     "trim out" +
                     unsure);
  }

  const Setup& setup_;
  const Trimming& trimming_;
  const Trimming::Sequence& sequence_;
  int64_t row_;
  int64_t length_;
  Batch in_full_;
  TrialOutputs whole_;
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
                       const BatchSource& targets, bool reads_parts, SequenceInputs& known)
    : loss_(loss) {
  if (inputs.size != targets.size) {  // for somebody else to refuse
    inputs_ = inputs;
    targets_ = targets;
    return;
  }
  const Surveyed all(options, inputs, reads_parts, /*targets=*/false);
  const Surveyed beside(options, targets, reads_parts, /*targets=*/true);
  trimming_ = trimming_of(options, all.batch(), beside.batch(), known);
  for (const Leaf& leaf : all.batch().leaves()) {
    if (!leaf.tensor.defined() || !leaf.tensor.requires_grad()) continue;
    throw InvalidArgument(
        "trim= sorts copies of the inputs, and one of them requires grad, which would not reach "
        "the caller's; detach it, or leave trim out");
  }
  inputs_ = all.in_parts() ? sorted_rows(inputs, all.dims(), trimming_)
                           : BatchSource::from(trimming_->sorted(all.batch()), "inputs");
  targets_ = beside.in_parts()
                 ? sorted_rows(targets, beside.dims(), trimming_)
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
  Findings& findings = *setup.resources.findings;
  auto& known = findings.trimmed_outputs;
  known.resize(trimming.sequences.size());
  const int64_t step = findings.trimmed_steps++;
  const bool due = (step & (step + 1)) == 0;
  Setup plain = setup;  // nothing is padded back
  plain.problem.trimming = nullptr;
  for (size_t i = 0; i < known.size(); ++i) {
    Trimming::Sequence& sequence = trimming.sequences[i];
    // An attempt before this one may have chosen already.
    const bool alike = known[i] && known[i]->left == sequence.left &&
                       (known[i]->asked == sequence.inputs || known[i]->inputs == sequence.inputs);
    if (alike) {
      sequence.outputs = known[i];
      sequence.inputs = known[i]->inputs;
    }
    if ((alike && !due) || sequence.inputs.empty()) continue;
    Trimming::Outputs found;
    found.left = sequence.left;
    found.asked = alike ? known[i]->asked : sequence.inputs;
    const std::vector<Trimming::Along> all = sequence.inputs;
    bool decided = alike || sequence.unsure.empty();
    const std::vector<int64_t> rows = trimming.trimmed_rows(sequence, step);
    for (const int64_t at : rows) {
      OneRow row(plain, trimming, sequence, at);
      if (!decided && row.tells()) {
        decided = row.choose(sequence);
      } else if (sequence.inputs != all && !alike && !row.gives_the_same(sequence.inputs)) {
        sequence.inputs = all;
      }
      row.compare(found);
    }
    if (rows.empty()) continue;
    found.inputs = sequence.inputs;
    sequence.outputs = std::move(found);
    if (decided) known[i] = sequence.outputs;
  }
}

}  // namespace infinitybatch
