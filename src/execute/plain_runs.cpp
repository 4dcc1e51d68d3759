#include "execute/plain_runs.hpp"

#include "core/bits.hpp"
#include "core/out_of_memory.hpp"
#include "coupled/row_errors.hpp"

#include <infinitybatch/core/errors.hpp>

#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <optional>

namespace infinitybatch {
namespace {

using NumberKind = PlainNumbers::Kind;

[[noreturn]] void refuse_number(const std::string& name) {
  throw CouplingError(
      name, "forward changes '" + name +
                "', a number that it keeps in Python, by another amount for other samples: it "
                "counts samples, or depends on them, and micro-batches would leave another number "
                "than the whole batch; hand it in as an argument, make the budget large enough for "
                "one micro-batch, or allow it with batch_coupling=\"per_micro_batch\"");
}

[[noreturn]] void refuse_object(const std::string& name) {
  throw CouplingError(
      name, "forward depends on '" + name +
                "', which it makes or changes in Python, and makes another one of other samples, "
                "where the whole batch makes one of all: make it in front of the step, hand it in "
                "as an argument, make the budget large enough for one micro-batch, or allow it "
                "with batch_coupling=\"per_micro_batch\"");
}

[[noreturn]] void refuse_parameter(const std::string& name) {
  throw CouplingError(
      name, "forward puts another parameter into '" + name +
                "' in each call, and the gradient of each micro-batch goes to the one that it has "
                "made: make the budget large enough for one micro-batch, or write into the "
                "parameter that is there, as in with torch.no_grad(): self.weight.copy_(values)");
}

[[noreturn]] void refuse_generator(const std::string& name) {
  throw Unsupported(
      "forward advances '" + name +
      "', a generator or iterator that Python cannot copy, and each micro-batch would advance it "
      "once more, where the whole batch does once: keep its values in a list and count in an "
      "attribute (self.step += 1), use iter([...]) or itertools.count(), or call next() in front "
      "of the step");
}

bool same_outputs(const Batch& a, const Batch& b) {
  at::Tensor differs;
  note_differences(a, b, differs);
  return !differs.defined() || !differs.item<bool>();
}

/// What a run left of numbers, by name.
struct LeftNumbers {
  std::map<std::string, std::string> text;
  std::map<std::string, double> by;

  explicit LeftNumbers(const std::vector<PlainNumber>& numbers) {
    for (const PlainNumber& each : numbers) {
      text[each.name] = each.left;
      by[each.name] = each.by.value_or(NAN);
    }
  }
  std::string comes_to(const std::string& name) const {
    const auto found = text.find(name);
    return found == text.end() ? std::string() : found->second;
  }
  double moved(const std::string& name) const {
    const auto found = by.find(name);
    return found == by.end() ? 0 : found->second;
  }
};

/// Numbers that come out otherwise where forward finds others: those that it only writes do not.
std::set<std::string> read_by_forward(const LeftNumbers& a, const LeftNumbers& b) {
  std::set<std::string> names;
  const auto add = [&](const LeftNumbers& one, const LeftNumbers& other) {
    for (const auto& [name, text] : one.text) {
      const auto found = other.text.find(name);
      if (found == other.text.end() || found->second != text) names.insert(name);
    }
  };
  add(a, b);
  add(b, a);
  return names;
}

bool is_sum(double whole, double part, double rest) {
  return std::abs(whole - part - rest) <= 1e-9 * std::max({1.0, std::abs(whole), std::abs(part)});
}

/// \param run what forward on these rows leaves
/// \param rows not the batch's first one
NumberKind kind_of_counter(const std::string& name, const LeftNumbers& here, Rows rows,
                           const std::function<LeftNumbers(Rows)>& run) {
  const bool several = rows.size() > 1;
  const int64_t begin = several ? rows.begin + 1 : rows.begin - 1;
  const Rows some{begin, rows.end};
  std::optional<LeftNumbers> beside;
  try {
    beside = run(some);
  } catch (...) {
    keep_foreign_exception(std::current_exception());
    if (!is_out_of_memory(std::current_exception())) throw;
    return NumberKind::counter;  // more than one sample has no room
  }
  const LeftNumbers& other = *beside;
  if (here.comes_to(name) == other.comes_to(name)) return NumberKind::counter;
  const int64_t row = std::min(begin, rows.begin);
  const LeftNumbers rest = run({row, row + 1});
  const LeftNumbers& all = several ? here : other;
  const LeftNumbers& part = several ? other : here;
  const bool sum = is_sum(all.moved(name), part.moved(name), rest.moved(name));
  if (!sum) refuse_number(name);
  return NumberKind::sum;
}

}  // namespace

PlainNumbers* PlainNumbers::at_work() noexcept {
  return ThreadContext::get().numbers;
}

NumberKind PlainNumbers::kind_of(const std::string& name) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = kinds_.find(name);
  return found == kinds_.end() ? NumberKind::unknown : found->second;
}

void PlainNumbers::learn(const std::string& name, Kind kind) {
  const std::lock_guard<std::mutex> lock(mutex_);
  kinds_[name] = kind;
}

bool PlainNumbers::moves() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return moves_;
}

void PlainNumbers::note_move(bool moves) {
  const std::lock_guard<std::mutex> lock(mutex_);
  moves_ = moves;
}

bool PlainNumbers::whole() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return whole_;
}

void PlainNumbers::learn_whole() {
  const std::lock_guard<std::mutex> lock(mutex_);
  whole_ = true;
}

std::string PlainNumbers::lost() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return lost_;
}

void PlainNumbers::note_lost(const std::string& name) {
  const std::lock_guard<std::mutex> lock(mutex_);
  lost_ = name;
}

bool PlainNumbers::may_ask() {
  constexpr int kMost = 16;
  const std::lock_guard<std::mutex> lock(mutex_);
  return ++asked_ <= kMost;
}

std::vector<NamedParameter> PlainRuns::begin(const PlainLook& look) {
  if (const std::string lost = known_->lost(); !lost.empty()) refuse_generator(lost);
  look_ = look;
  base_ = look.state();
  begun_ = true;
  return std::move(base_.tensors);
}

void PlainRuns::first_is_over() {
  changed_ = base_.changed();
  moved_ = changed_ ? base_.numbers() : std::vector<PlainNumber>();
  replaced_.clear();
  if (changed_) {
    for (PlainObject& each : base_.objects()) replaced_.push_back(std::move(each.name));
  }
  note_move();
}

void PlainRuns::note_move() const {
  const auto moves = [this](const PlainNumber& each) {
    const NumberKind kind = known_->kind_of(each.name);
    return kind == NumberKind::unknown ? each.by.has_value() : kind != NumberKind::harmless;
  };
  known_->note_move(changed_ &&
                    (known_->whole() || std::any_of(moved_.begin(), moved_.end(), moves)));
}

bool PlainRuns::counts() const {
  return known_->whole() || !made_.empty() ||  // the others may not make one too
         std::any_of(moved_.begin(), moved_.end(), [this](const PlainNumber& each) {
           return known_->kind_of(each.name) != NumberKind::harmless;
         });
}

void PlainRuns::check_can_put_back() const {
  for (const PlainNumber& each : moved_) {
    if (!each.put_back) refuse_generator(each.name);
  }
}

void PlainRuns::put_back(bool guess) const {
  check_can_put_back();
  if (known_->whole() || (guess && single_)) return base_.restore();
  for (const PlainNumber& each : moved_) {
    const NumberKind kind = known_->kind_of(each.name);
    const bool counts = kind == NumberKind::counter || kind == NumberKind::sum;
    if (counts || (guess && kind == NumberKind::unknown && each.by)) each.put_back();
  }
}

void PlainRuns::after_part() {
  if (!changed_ && !counts()) return;
  try {
    meet_parameters();
    if (counts()) meet_left();
  } catch (const CouplingError&) {
    found_ = true;
    throw;
  }
}

void PlainRuns::note_remade(const PlainState& now) const {
  if (!remade_) return;
  for (const PlainObject& each : now.objects()) {
    if (each.parameter.defined() && each.before.defined()) remade_(each.parameter, each.before);
  }
}

/// A parameter that this part's forward has made gets the gradient of this part alone, unless all
/// find the one that the first has made.
void PlainRuns::meet_parameters() {
  if (!changed_) return;
  for (const PlainObject& each : base_.objects()) {
    if (!each.parameter.defined()) continue;
    const auto [known, first] = made_.try_emplace(each.name, each.parameter);
    if (!first && !known->second.is_same(each.parameter)) refuse_parameter(each.name);
  }
}

/// What this part's forward left of counters and, where all is put back, of objects.
void PlainRuns::meet_left() {
  std::set<std::string> met;
  const bool first = !std::exchange(met_first_, true);
  for (const PlainNumber& each : base_.numbers()) {
    const NumberKind kind = known_->kind_of(each.name);
    if (kind == NumberKind::sum) sums_[each.name] += each.by.value_or(NAN);
    if (kind != NumberKind::counter) continue;
    met.insert(each.name);
    if (first) {
      left_[each.name] = each.left;
    } else if (const auto known = left_.find(each.name);
               known == left_.end() || known->second != each.left) {
      refuse_number(each.name);
    }
  }
  for (const auto& [name, text] : left_) {
    if (!met.contains(name)) refuse_number(name);
  }
  if (!known_->whole()) return;
  std::map<std::string, std::string> kept;
  for (const PlainObject& each : base_.objects()) kept[each.name] = each.describe();
  if (first) kept_ = kept;
  for (const auto& [name, text] : kept_) {
    if (const auto found = kept.find(name); found == kept.end() || found->second != text) {
      refuse_object(name);
    }
  }
  for (const auto& [name, text] : kept) {
    if (!kept_.contains(name)) refuse_object(name);
  }
}

void PlainRuns::count_anew() {
  met_first_ = false;
  left_.clear();
  sums_.clear();
  kept_.clear();
  made_.clear();
}

void PlainRuns::commit() const {
  for (const PlainNumber& each : moved_) {
    const auto sum = sums_.find(each.name);
    if (sum != sums_.end()) each.move(sum->second);
  }
}

void PlainRuns::roll_back() {
  if (!begun_) return;
  base_.restore();
  if (!base_.changed()) return;
  for (const PlainNumber& each : base_.numbers()) {
    if (!each.put_back) known_->note_lost(each.name);
  }
}

void PlainRuns::forget() {
  begun_ = changed_ = single_ = false;
  asks_ = true;
  base_ = PlainState();
  moved_.clear();
  replaced_.clear();
  count_anew();
}

bool PlainRuns::wants_to_learn(bool any) const {
  if (!asks_ || !changed_) return false;
  if (any) return !known_->whole();
  const auto is_unknown = [this](const std::string& name) {
    return known_->kind_of(name) == NumberKind::unknown;
  };
  return std::any_of(moved_.begin(), moved_.end(),
                     [&](const PlainNumber& each) { return is_unknown(each.name); }) ||
         (!known_->whole() && std::any_of(replaced_.begin(), replaced_.end(), is_unknown));
}

/// The whole batch's forward moves a sum further than a micro-batch's: what it does must not depend
/// on it, now or later (a threshold).
void PlainRuns::check_unread(const std::string& name, Rows first, const Batch& wanted,
                             const std::function<Batch(Rows)>& run, const PlainState& now) const {
  for (const double by : {static_cast<double>(first.size()), 1e3, 1e6}) {
    base_.restore();
    for (const PlainNumber& each : moved_) {
      if (each.name == name && each.move) each.move(by);
    }
    const Batch found = run(first);
    now.restore();
    if (!same_outputs(wanted, found)) refuse_number(name);
  }
}

void PlainRuns::learn(Rows first, int64_t total, const std::function<Batch(Rows)>& run) {
  check_can_put_back();
  if (!known_->may_ask()) {
    asks_ = false;
    return;
  }
  // What the first call made of its samples (a table) is another for other samples.
  const int64_t begin = std::min(first.end, total - first.size());
  const Rows other{begin, begin + first.size()};
  const PlainState now = look_.state();
  std::set<std::string> counters;
  // From what the first forward has left, but for counters.
  const auto as_candidate = [&](Rows rows) {
    for (const PlainNumber& each : moved_) {
      if (counters.contains(each.name)) each.put_back();
    }
    try {
      Batch outputs = run(rows);
      LeftNumbers left(base_.numbers());
      now.restore();
      return std::pair(std::move(outputs), std::move(left));
    } catch (...) {
      keep_foreign_exception(std::current_exception());
      now.restore();
      throw;
    }
  };
  // A flag beside a buffer that the first call makes: forward cannot run on one without the other,
  // and the buffer has been put back.
  const auto tried = [&]() -> std::optional<std::pair<Batch, LeftNumbers>> {
    try {
      return as_candidate(other);
    } catch (const Error&) {
      throw;
    } catch (...) {
      const std::exception_ptr error = std::current_exception();
      keep_foreign_exception(error);
      if (is_out_of_memory(error) || !coupled::may_be_of_state(error)) throw;
      return std::nullopt;
    }
  };
  try {
    const auto later = tried();
    base_.restore();
    const Batch as_first = run(other);
    if (later) counters = read_by_forward(later->second, LeftNumbers(base_.numbers()));
    now.restore();
    for (PlainNumber& each : base_.numbers()) {
      const bool known = std::any_of(moved_.begin(), moved_.end(),
                                     [&](const PlainNumber& one) { return one.name == each.name; });
      if (!known) moved_.push_back(std::move(each));
    }
    bool whole = !later || (counters.empty() && !same_outputs(later->first, as_first));
    if (!counters.empty()) {
      const auto [outputs, left] = as_candidate(other);
      whole = !same_outputs(outputs, as_first);
      for (const std::string& name : counters) {
        const NumberKind kind = kind_of_counter(
            name, left, other, [&](Rows rows) { return as_candidate(rows).second; });
        if (kind == NumberKind::sum) check_unread(name, other, as_first, run, now);
        known_->learn(name, kind);
      }
    }
    for (const PlainNumber& each : moved_) {
      if (known_->kind_of(each.name) == NumberKind::unknown)
        known_->learn(each.name, NumberKind::harmless);
    }
    for (const std::string& name : replaced_) known_->learn(name, NumberKind::harmless);
    if (whole) {
      base_.restore();
      const Batch again = run(other);
      now.restore();
      // Where forward gives other outputs each time nobody can tell.
      if (!later || same_outputs(as_first, again)) known_->learn_whole();
    }
  } catch (const CouplingError&) {
    found_ = true;
    now.restore();
    throw;
  } catch (...) {
    const std::exception_ptr error = std::current_exception();
    keep_foreign_exception(error);
    now.restore();
    // Where forward fails on what it has left the next micro-batch fails too, and says so.
    asks_ = false;
    if (is_out_of_memory(error) || !coupled::may_be_of_rows(error)) throw;
    return;
  }
  note_move();
  count_anew();
  after_part();  // the first one
}

}  // namespace infinitybatch
