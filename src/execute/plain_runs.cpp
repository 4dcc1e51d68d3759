#include <infinitybatch/execute/plain_runs.hpp>

#include <infinitybatch/core/bits.hpp>
#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/core/out_of_memory.hpp>
#include <infinitybatch/coupled/row_errors.hpp>

#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <optional>

namespace infinitybatch {
namespace {

using Kind = PlainNumbers::Kind;

thread_local PlainNumbers* innermost = nullptr;

[[noreturn]] void refuse(const std::string& name) {
  throw CouplingError(
      name, "forward changes '" + name +
                "', a number that it keeps in Python, by another amount for other samples: it "
                "counts samples, or depends on them, and micro-batches would leave another number "
                "than the whole batch; hand it in as an argument, make the budget large enough for "
                "one micro-batch, or allow it with batch_coupling=\"per_micro_batch\"");
}

bool same_outputs(const Batch& a, const Batch& b) {
  at::Tensor differs;
  note_differences(a, b, differs);
  return !differs.defined() || !differs.item<bool>();
}

/// What a run left of numbers, by name.
struct Left {
  std::map<std::string, std::string> text;
  std::map<std::string, double> by;

  explicit Left(const std::vector<PlainNumber>& numbers) {
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
std::set<std::string> read_by_forward(const Left& a, const Left& b) {
  std::set<std::string> names;
  const auto add = [&](const Left& one, const Left& other) {
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
Kind kind_of_counter(const std::string& name, const Left& here, Rows first,
                     const std::function<Left(Rows)>& run) {
  const bool several = first.size() > 1;
  const int64_t middle = several ? first.end - 1 : first.end;
  const Rows some{first.begin, several ? middle : middle + 1};
  std::optional<Left> beside;
  try {
    beside = run(some);
  } catch (...) {
    keep_foreign_exception(std::current_exception());
    if (!is_out_of_memory(std::current_exception())) throw;
    return Kind::counter;  // more than one sample has no room
  }
  const Left& other = *beside;
  if (here.comes_to(name) == other.comes_to(name)) return Kind::counter;
  const Left rest = run({middle, middle + 1});
  const Left& all = several ? here : other;
  const Left& part = several ? other : here;
  const bool sum = is_sum(all.moved(name), part.moved(name), rest.moved(name));
  if (!sum) refuse(name);
  return Kind::sum;
}

}  // namespace

PlainNumbers::Scope::Scope(PlainNumbers& numbers) noexcept
    : outer_(std::exchange(innermost, &numbers)) {}
PlainNumbers::Scope::~Scope() {
  innermost = outer_;
}

PlainNumbers* PlainNumbers::at_work() noexcept {
  return innermost;
}

Kind PlainNumbers::kind_of(const std::string& name) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = kinds_.find(name);
  return found == kinds_.end() ? Kind::unknown : found->second;
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

bool PlainNumbers::may_ask() {
  constexpr int kMost = 16;
  const std::lock_guard<std::mutex> lock(mutex_);
  return ++asked_ <= kMost;
}

std::vector<NamedParameter> PlainRuns::begin(const PlainLook& look) {
  look_ = look;
  base_ = look.state();
  begun_ = true;
  return std::move(base_.tensors);
}

void PlainRuns::first_is_over() {
  changed_ = base_.changed();
  moved_ = changed_ ? base_.numbers() : std::vector<PlainNumber>();
  known_->note_move(std::any_of(moved_.begin(), moved_.end(), [this](const PlainNumber& each) {
    return each.by && known_->kind_of(each.name) != Kind::harmless;
  }));
}

bool PlainRuns::counts() const {
  return known_->whole() ||
         std::any_of(moved_.begin(), moved_.end(), [this](const PlainNumber& each) {
           return known_->kind_of(each.name) != Kind::harmless;
         });
}

void PlainRuns::put_back(bool guess) const {
  if (known_->whole() || (guess && single_)) return base_.restore();
  for (const PlainNumber& each : moved_) {
    const Kind kind = known_->kind_of(each.name);
    const bool counts = kind == Kind::counter || kind == Kind::sum;
    if (counts || (guess && kind == Kind::unknown && each.by)) each.put_back();
  }
}

void PlainRuns::after_part() {
  if (!counts()) return;
  std::set<std::string> met;
  const bool first = left_.empty();
  for (const PlainNumber& each : base_.numbers()) {
    const Kind kind = known_->kind_of(each.name);
    if (kind == Kind::sum) sums_[each.name] += each.by.value_or(NAN);
    if (kind != Kind::counter) continue;
    met.insert(each.name);
    if (first) {
      left_[each.name] = each.left;
    } else if (const auto known = left_.find(each.name);
               known == left_.end() || known->second != each.left) {
      refuse(each.name);
    }
  }
  for (const auto& [name, text] : left_) {
    if (!met.contains(name)) refuse(name);
  }
}

void PlainRuns::count_anew() {
  left_.clear();
  sums_.clear();
}

void PlainRuns::commit() const {
  for (const PlainNumber& each : moved_) {
    const auto sum = sums_.find(each.name);
    if (sum != sums_.end()) each.move(sum->second);
  }
}

void PlainRuns::roll_back() {
  if (begun_) base_.restore();
}

void PlainRuns::forget() {
  begun_ = changed_ = single_ = false;
  asks_ = true;
  base_ = PlainState();
  moved_.clear();
  left_.clear();
  sums_.clear();
}

bool PlainRuns::wants_to_learn(bool any) const {
  if (any) return asks_ && changed_ && !known_->whole();
  return asks_ && std::any_of(moved_.begin(), moved_.end(), [this](const PlainNumber& each) {
           return known_->kind_of(each.name) == Kind::unknown;
         });
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
    if (!same_outputs(wanted, found)) refuse(name);
  }
}

void PlainRuns::learn(Rows first, const std::function<Batch(Rows)>& run) {
  if (!known_->may_ask()) {
    asks_ = false;
    return;
  }
  const PlainState now = look_.state();
  std::set<std::string> counters;
  // From what the first forward has left, but for counters.
  const auto as_candidate = [&](Rows rows) {
    for (const PlainNumber& each : moved_) {
      if (counters.contains(each.name)) each.put_back();
    }
    try {
      Batch outputs = run(rows);
      Left left(base_.numbers());
      now.restore();
      return std::pair(std::move(outputs), std::move(left));
    } catch (...) {
      keep_foreign_exception(std::current_exception());
      now.restore();
      throw;
    }
  };
  try {
    const auto [later, left_later] = as_candidate(first);
    base_.restore();
    const Batch as_first = run(first);
    counters = read_by_forward(left_later, Left(base_.numbers()));
    now.restore();
    for (PlainNumber& each : base_.numbers()) {
      const bool known = std::any_of(moved_.begin(), moved_.end(), [&](const PlainNumber& one) {
        return one.name == each.name;
      });
      if (!known) moved_.push_back(std::move(each));
    }
    bool whole = counters.empty() && !same_outputs(later, as_first);
    if (!counters.empty()) {
      const auto [outputs, left] = as_candidate(first);
      whole = !same_outputs(outputs, as_first);
      for (const std::string& name : counters) {
        const Kind kind = kind_of_counter(
            name, left, first, [&](Rows rows) { return as_candidate(rows).second; });
        if (kind == Kind::sum) check_unread(name, first, as_first, run, now);
        known_->learn(name, kind);
      }
    }
    for (const PlainNumber& each : moved_) {
      if (known_->kind_of(each.name) == Kind::unknown) known_->learn(each.name, Kind::harmless);
    }
    if (whole) {
      base_.restore();
      const Batch again = run(first);
      now.restore();
      // Where forward gives other outputs each time nobody can tell.
      if (same_outputs(as_first, again)) known_->learn_whole();
    }
  } catch (const CouplingError&) {
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
  left_.clear();
  sums_.clear();
  after_part();  // the first one
}

}  // namespace infinitybatch
