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

bool is_close(double a, double b) {
  // Numbers that forward reads out of fp32.
  return std::abs(a - b) <= 1e-6 * std::max({1e-30, std::abs(a), std::abs(b)});
}

using Numbers = std::map<std::string, PlainNumber>;

std::string text_of(const Numbers& numbers, const std::string& name) {
  const auto found = numbers.find(name);
  return found == numbers.end() ? std::string() : found->second.left;
}

std::string text_of(const std::map<std::string, std::string>& objects, const std::string& name) {
  const auto found = objects.find(name);
  return found == objects.end() ? std::string() : found->second;
}

/// What a run made of a number that it found as `number` was found.
double moved_by(const Numbers& numbers, const std::string& name) {
  const auto found = numbers.find(name);
  return found == numbers.end() ? 0 : found->second.by.value_or(NAN);
}

double made_of(const Numbers& numbers, const PlainNumber& number) {
  const auto found = numbers.find(number.name);
  if (found == numbers.end()) return number.added || number.appended ? 0 : number.from;
  return found->second.from + found->second.by.value_or(NAN);
}

/// Rows of which the first are those of all of the others.
struct Laws {
  Rows rows[3];
  Numbers left[3];

  bool same(const std::string& name) const {
    const std::string text = text_of(left[0], name);
    return text == text_of(left[1], name) && text == text_of(left[2], name);
  }
  bool adds_up(const std::string& name) const {
    return is_close(moved_by(left[0], name), moved_by(left[1], name) + moved_by(left[2], name));
  }
  bool is_total(const PlainNumber& number) const {
    return is_close(made_of(left[0], number), made_of(left[1], number) + made_of(left[2], number));
  }
  bool is_mean(const PlainNumber& number) const {
    const auto weighted = [&](int i) {
      return made_of(left[i], number) * static_cast<double>(rows[i].size());
    };
    return is_close(weighted(0), weighted(1) + weighted(2));
  }
};

}  // namespace

PlainNumbers* PlainNumbers::at_work() noexcept {
  return ThreadContext::get().numbers;
}

PlainNumbers::Kind PlainNumbers::kind_of(const std::string& name) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = kinds_.find(name);
  return found == kinds_.end() ? Kind::unknown : found->second;
}

void PlainNumbers::learn(const std::string& name, Kind kind) {
  const std::lock_guard<std::mutex> lock(mutex_);
  kinds_[name] = kind;
}

bool PlainNumbers::left_apart() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return left_apart_;
}

void PlainNumbers::note_left_apart() {
  const std::lock_guard<std::mutex> lock(mutex_);
  left_apart_ = true;
}

bool PlainNumbers::moves() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return moves_;
}

void PlainNumbers::note_move(bool moves) {
  const std::lock_guard<std::mutex> lock(mutex_);
  moves_ = moves;
}

bool PlainNumbers::reads_apart() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return reads_apart_;
}

void PlainNumbers::learn_reads_apart() {
  const std::lock_guard<std::mutex> lock(mutex_);
  reads_apart_ = true;
}

bool PlainNumbers::reads_own() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return reads_own_;
}

void PlainNumbers::learn_reads_own() {
  const std::lock_guard<std::mutex> lock(mutex_);
  reads_own_ = true;
}

std::string PlainNumbers::lost() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return lost_;
}

void PlainNumbers::note_lost(const std::string& name) {
  const std::lock_guard<std::mutex> lock(mutex_);
  lost_ = name;
}

void PlainNumbers::begin() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++steps_;
}

bool PlainNumbers::may_ask() {
  constexpr int kMost = 16;
  const std::lock_guard<std::mutex> lock(mutex_);
  return ++asked_ <= kMost;
}

bool PlainNumbers::asks_again(bool decides) const {
  constexpr int64_t kFirst = 16;  // steps in each of which a container has another length
  const std::lock_guard<std::mutex> lock(mutex_);
  return (decides && steps_ <= kFirst) || (steps_ & (steps_ - 1)) == 0;
}

struct PlainRuns::Run {
  Batch outputs;
  Numbers numbers;
  std::map<std::string, std::string> objects;

  Run(Batch outputs, const PlainState& base) : outputs(std::move(outputs)) {
    for (PlainNumber& each : base.numbers()) numbers[each.name] = std::move(each);
    for (const PlainObject& each : base.objects()) objects[each.name] = each.describe();
  }
};

std::vector<NamedParameter> PlainRuns::begin(const PlainLook& look) {
  if (const std::string lost = known_->lost(); !lost.empty()) refuse_generator(lost);
  if (begun_) base_.restore();  // the first forward failed, and runs once more
  look_ = look;
  base_ = look.state();
  begun_ = true;
  return std::move(base_.tensors);
}

bool PlainRuns::forward_is_over() {
  const bool changed = base_.changed();
  changed_ = changed_ || changed;
  moved_ = changed ? base_.numbers() : std::vector<PlainNumber>();
  replaced_ = changed ? base_.objects() : std::vector<PlainObject>();
  note_move();
  return changed_;
}

void PlainRuns::note_move() const {
  const auto moves = [this](const PlainNumber& each) {
    const Kind kind = known_->kind_of(each.name);
    if (kind == Kind::unknown) return each.by.has_value() && !each.appended;
    return kind == Kind::counter || kind == Kind::sum;
  };
  // What is made once (a table) the next forward does not make.
  const auto makes = [this](const PlainObject& each) {
    const Kind kind = known_->kind_of(each.name);
    return !each.decides && (kind == Kind::kept || kind == Kind::once);
  };
  known_->note_move(changed_ && (known_->reads_apart() || known_->reads_own() ||
                                 std::any_of(moved_.begin(), moved_.end(), moves) ||
                                 std::any_of(replaced_.begin(), replaced_.end(), makes)));
}

void PlainRuns::check_can_put_back() const {
  for (const PlainNumber& each : moved_) {
    if (!each.put_back) refuse_generator(each.name);
  }
}

void PlainRuns::put_back() const {
  if (!changed_) return;
  check_can_put_back();
  base_.restore();
  if (!leaves_stay()) return;
  for (const Left& each : parts_.left_with_leaves) {
    const Kind kind = known_->kind_of(each.name);
    if (kind == Kind::once || (each.is_number && kind == Kind::kept)) each.put_in();
  }
}

/// It collects the gradients of all, and with it stays the flag that says that it is there.
bool PlainRuns::leaves_stay() const {
  const std::vector<Left>& left = parts_.left_with_leaves;
  return std::any_of(left.begin(), left.end(), [this](const Left& each) {
    return each.holds_leaves && known_->kind_of(each.name) == Kind::once;
  });
}

/// Forward cannot go on from them alone: from now on they are put back as all else.
void PlainRuns::refuse_leaves() const {
  std::string name;
  for (const Left& each : parts_.left_with_leaves) {
    if (!each.holds_leaves || known_->kind_of(each.name) != Kind::once) continue;
    known_->learn(each.name, Kind::kept);
    name = each.name;
  }
  refuse_object(name);
}

void PlainRuns::note_remade(const PlainState& now) const {
  if (!remade_) return;
  for (const PlainObject& each : now.objects()) {
    if (each.leaves.size() != each.leaves_before.size()) continue;
    for (size_t i = 0; i < each.leaves.size(); ++i) {
      remade_(each.leaves[i].tensor, each.leaves_before[i].tensor);
    }
  }
}

void PlainRuns::after_part(Rows rows, bool part) {
  try {
    meet_left(rows);
    if (part) meet_leaves();
    check_left();
  } catch (const CouplingError&) {
    found_ = true;
    throw;
  }
}

void PlainRuns::meet_left(Rows rows) {
  ++parts_.count;
  parts_.rows += rows.size();
  parts_.last = rows;
  const bool first = parts_.count == 1;
  const auto weight = static_cast<double>(rows.size());
  const auto before = static_cast<double>(parts_.rows - rows.size());
  std::set<std::string> here;
  for (const PlainNumber& each : moved_) {
    here.insert(each.name);
    auto [place, fresh] = parts_.numbers.try_emplace(each.name);
    Met& met = place->second;
    const double left = each.from + each.by.value_or(NAN);
    if (fresh) {
      met.apart = !first;
      // Earlier parts left it as it was.
      if (!each.added && !each.appended) {
        met.total = each.from * static_cast<double>(parts_.count - 1);
        met.weighted = each.from * before;
      }
    } else {
      met.apart = met.apart || met.number.left != each.left;
    }
    met.by += each.by.value_or(NAN);
    met.total += left;
    met.weighted += left * weight;
    met.number = each;
    met.part = parts_.count;
  }
  for (auto& [name, met] : parts_.numbers) {
    if (here.contains(name)) continue;
    met.apart = true;
    if (met.number.added || met.number.appended) continue;
    met.total += met.number.from;
    met.weighted += met.number.from * weight;
  }
  for (const PlainObject& each : replaced_) {
    if (first) parts_.of_first.insert(each.name);
    if (each.added) parts_.added[each.name] = {parts_.count, each.put_in};
  }
}

/// A parameter that this part's forward has made gets the gradient of this part alone, unless all
/// find the one that the first has made.
void PlainRuns::meet_leaves() {
  const bool first = parts_.count == 1;
  bool any = false;
  for (const PlainObject& each : replaced_) {
    any = any || !each.leaves.empty();
    for (const PlainLeaf& leaf : each.leaves) {
      if (!leaf.is_parameter) continue;
      std::vector<at::Tensor>& made = parts_.made[each.name];
      const bool known = std::any_of(made.begin(), made.end(), [&](const at::Tensor& one) {
        return one.is_same(leaf.tensor);
      });
      if (!known && !first) refuse_parameter(each.name);
      if (!known) made.push_back(leaf.tensor);
    }
  }
  if (!any || !first) return;
  for (const PlainNumber& each : moved_) {
    if (each.put_in) parts_.left_with_leaves.push_back({each.name, each.put_in, true, false});
  }
  for (const PlainObject& each : replaced_) {
    const bool holds = !each.leaves.empty();
    if (each.put_in) parts_.left_with_leaves.push_back({each.name, each.put_in, false, holds});
  }
}

/// What parts have left is as one forward of them all leaves it, as far as somebody can tell.
void PlainRuns::check_left() {
  const bool reads = known_->reads_apart();
  for (const auto& [name, met] : parts_.numbers) {
    if (!met.apart) continue;
    const Kind kind = known_->kind_of(name);
    const bool exact = kind == Kind::sum || kind == Kind::total;
    if (kind == Kind::counter || (reads && !exact)) refuse_number(name);
    if (kind == Kind::kept) known_->learn(name, Kind::unknown);  // it depends on samples after all
  }
  if (!reads) return;
  std::map<std::string, std::string> left;
  for (const PlainObject& each : replaced_) left[each.name] = each.describe();
  if (parts_.count == 1) parts_.objects = left;
  for (const auto& [name, text] : parts_.objects) {
    if (const auto found = left.find(name); found == left.end() || found->second != text) {
      refuse_object(name);
    }
  }
  for (const auto& [name, text] : left) {
    if (!parts_.objects.contains(name)) refuse_object(name);
  }
}

void PlainRuns::commit() const {
  if (parts_.count < 2) return;
  bool apart = false;
  // The last part has found none of what others have added.
  for (const auto& [name, added] : parts_.added) {
    if (added.part != parts_.count) added.put_in();
    apart = apart || known_->kind_of(name) == Kind::written;
  }
  for (const PlainObject& each : replaced_) {
    apart = apart || known_->kind_of(each.name) == Kind::written;
  }
  for (const auto& [name, met] : parts_.numbers) {
    const PlainNumber& number = met.number;
    const Kind kind = known_->kind_of(name);
    if (kind == Kind::sum && number.set) {
      number.set(number.from + met.by);
    } else if (kind == Kind::total && number.set) {
      number.set(met.total);
    } else if (kind == Kind::mean && number.set && met.apart) {
      number.set(met.weighted / static_cast<double>(parts_.rows));
    } else {
      apart = apart || met.apart;
      if (number.added && number.put_in && met.part != parts_.count) number.put_in();
    }
  }
  if (apart) known_->note_left_apart();
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
  begun_ = changed_ = false;
  asks_ = true;
  asked_at_ = 0;
  base_ = PlainState();
  moved_.clear();
  replaced_.clear();
  count_anew();
}

bool PlainRuns::wants_to_learn() const {
  if (!asks_ || !changed_ || parts_.count == 0 || asked_at_ == parts_.count) return false;
  const auto is_unknown = [this](const auto& each) {
    return known_->kind_of(each.name) == Kind::unknown;
  };
  if (std::any_of(moved_.begin(), moved_.end(), is_unknown) ||
      std::any_of(replaced_.begin(), replaced_.end(), is_unknown)) {
    return true;
  }
  const bool alike = std::all_of(moved_.begin(), moved_.end(), [this](const PlainNumber& each) {
    const Kind kind = known_->kind_of(each.name);
    return kind == Kind::counter || kind == Kind::kept;
  });
  if (asked_at_ != 0 || (alike && replaced_.empty())) return false;
  return known_->asks_again(std::any_of(replaced_.begin(), replaced_.end(),
                                        [](const PlainObject& each) { return each.decides; }));
}

/// The whole batch's forward moves a sum further than a micro-batch's: what it does must not depend
/// on it, now or later (a threshold).
void PlainRuns::check_unread(const PlainNumber& number, Rows first, const Batch& wanted,
                             const std::function<Batch(Rows)>& run, const PlainState& now) const {
  for (const double by : {static_cast<double>(first.size()), 1e3, 1e6}) {
    base_.restore();
    number.set(number.from + by);
    const Batch found = run(first);
    now.restore();
    if (!same_outputs(wanted, found)) refuse_number(number.name);
  }
}

void PlainRuns::learn(int64_t total, const std::function<Batch(Rows)>& run) {
  check_can_put_back();
  asked_at_ = parts_.count;
  const auto is_unknown = [this](const auto& each) {
    return known_->kind_of(each.name) == Kind::unknown;
  };
  const bool known = std::none_of(moved_.begin(), moved_.end(), is_unknown) &&
                     std::none_of(replaced_.begin(), replaced_.end(), is_unknown);
  if (!known && !known_->may_ask() && !known_->asks_again(/*decides=*/false)) {
    asks_ = false;
    return;
  }
  const PlainState now = look_.state();
  const auto run_from = [&](const std::function<void()>& prepare, Rows rows) {
    prepare();
    Run made(run(rows), base_);
    now.restore();
    return made;
  };
  // A flag beside a buffer that the first call makes: forward cannot run on one without the other,
  // and the buffer has been put back.
  const auto try_from = [&](const std::function<void()>& prepare, Rows rows) -> std::optional<Run> {
    try {
      return run_from(prepare, rows);
    } catch (const Error&) {
      throw;
    } catch (...) {
      const std::exception_ptr error = std::current_exception();
      keep_foreign_exception(error);
      if (is_out_of_memory(error) || !coupled::may_be_of_state(error)) throw;
      now.restore();
      return std::nullopt;
    }
  };
  try {
    experiment(total, run, run_from, try_from, now);
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
    const bool whole = parts_.rows == total;  // no smaller micro-batch will ask
    if (is_out_of_memory(error) ? !whole : !coupled::may_be_of_rows(error)) throw;
    return;
  }
  note_move();
  try {
    check_left();
  } catch (const CouplingError&) {
    found_ = true;
    throw;
  }
}

void PlainRuns::experiment(int64_t total, const std::function<Batch(Rows)>& run,
                           const RunFrom& run_from, const TryFrom& try_from,
                           const PlainState& now) {
  const auto as_found = [this] { base_.restore(); };
  // What the first call made of its samples (a table) is another for other samples.
  const Rows own = parts_.last;
  const int64_t begin = std::min(own.end, total - own.size());
  const Rows other = parts_.count == 1 ? Rows{begin, begin + own.size()} : own;
  const Run first = run_from(as_found, other);

  std::vector<PlainNumber> numbers = moved_;
  for (const auto& [name, number] : first.numbers) {
    const bool met = std::any_of(moved_.begin(), moved_.end(),
                                 [&](const PlainNumber& each) { return each.name == name; });
    if (!met) numbers.push_back(number);
  }
  const bool known = std::none_of(numbers.begin(), numbers.end(), [this](const PlainNumber& each) {
    return known_->kind_of(each.name) == Kind::unknown;
  });
  const std::optional<Run> later = try_from([&] { now.restore(); }, other);
  const auto differs_from = [&](const std::optional<Run>& made) {
    // Where forward gives other outputs each time nobody can tell.
    return !made || (!same_outputs(made->outputs, first.outputs) &&
                     same_outputs(run_from(as_found, other).outputs, first.outputs));
  };
  if (differs_from(later)) known_->learn_reads_own();
  if (!known) {
    std::set<std::string> accumulate;
    for (const PlainNumber& each : numbers) {
      if (later && text_of(first.numbers, each.name) != text_of(later->numbers, each.name)) {
        accumulate.insert(each.name);
      }
    }
    learn_kinds(numbers, accumulate, first, other, total, run_from);
    for (const PlainNumber& each : numbers) {
      if (known_->kind_of(each.name) == Kind::sum && each.set) {
        check_unread(each, other, first.outputs, run, now);
      }
    }
  }

  // What depends on the samples forward must not read, for it is one micro-batch's.
  std::vector<std::function<void()>> apart;
  std::function<void()> refuse;
  for (const PlainNumber& each : moved_) {
    const auto met = parts_.numbers.find(each.name);
    const bool differs = text_of(first.numbers, each.name) != each.left ||
                         (met != parts_.numbers.end() && met->second.apart);
    const Kind kind = known_->kind_of(each.name);
    if (kind == Kind::sum || kind == Kind::total || !each.put_in) continue;
    if (!differs && kind != Kind::written) continue;
    apart.push_back(each.put_in);
    if (!refuse) refuse = [name = each.name] { refuse_number(name); };
  }
  for (const PlainObject& each : replaced_) {
    const auto found = first.objects.find(each.name);
    const bool differs = found == first.objects.end() || found->second != each.describe() ||
                         !parts_.of_first.contains(each.name);
    // Once it was apart, it may hold what an earlier step left.
    const bool written = differs || known_->kind_of(each.name) == Kind::written;
    const bool once = later && text_of(later->objects, each.name) == text_of(first.objects, each.name);
    known_->learn(each.name, written ? Kind::written : once ? Kind::once : Kind::kept);
    if (!written) continue;
    apart.push_back(each.put_in);
    if (!refuse) refuse = [name = each.name] { refuse_object(name); };
  }
  const auto as_left = [&] {
    base_.restore();
    for (const auto& put_in : apart) put_in();
  };
  if (!apart.empty() && differs_from(try_from(as_left, other))) {
    known_->learn_reads_apart();
    refuse();
  }
  const auto as_next = [this] { put_back(); };
  if (leaves_stay() && differs_from(try_from(as_next, other))) refuse_leaves();
}

void PlainRuns::learn_kinds(const std::vector<PlainNumber>& numbers,
                            const std::set<std::string>& accumulate, const Run& first, Rows other,
                            int64_t total, const RunFrom& run_from) {
  const auto as_found = [this] { base_.restore(); };
  const bool any = std::any_of(numbers.begin(), numbers.end(), [this](const PlainNumber& each) {
    return known_->kind_of(each.name) == Kind::unknown && each.by && each.set;
  });
  // Fewer samples than these, or more.
  std::optional<Laws> laws;
  if (any && total > 1) {
    try {
      laws.emplace();
      const int64_t half = other.size() / 2;
      if (half > 0) {
        laws->rows[0] = other;
        laws->rows[1] = {other.begin, other.begin + half};
        laws->rows[2] = {other.begin + half, other.end};
        laws->left[0] = first.numbers;
      } else {
        const int64_t begin = other.begin > 0 ? other.begin - 1 : 0;
        laws->rows[0] = {begin, begin + 2};
        laws->rows[1] = {begin, begin + 1};
        laws->rows[2] = {begin + 1, begin + 2};
        laws->left[0] = run_from(as_found, laws->rows[0]).numbers;
      }
      for (const int i : {1, 2}) laws->left[i] = run_from(as_found, laws->rows[i]).numbers;
    } catch (...) {
      const std::exception_ptr error = std::current_exception();
      keep_foreign_exception(error);
      if (!is_out_of_memory(error) && !coupled::may_be_of_rows(error)) throw;
      laws.reset();  // that many samples have no room, or forward does not take them
    }
  }
  for (const PlainNumber& each : numbers) {
    if (known_->kind_of(each.name) != Kind::unknown) continue;
    const bool accumulates = accumulate.contains(each.name) && !each.appended;
    const auto met = parts_.numbers.find(each.name);
    const bool apart = met != parts_.numbers.end() && met->second.apart;
    const bool same = !apart && text_of(first.numbers, each.name) == each.left;
    Kind kind = accumulates ? Kind::counter : same ? Kind::kept : Kind::written;
    if (laws && each.by && each.set && !laws->same(each.name)) {
      if (accumulates && laws->adds_up(each.name)) {
        kind = Kind::sum;
      } else if (!accumulates && laws->is_total(each)) {
        kind = Kind::total;
      } else if (!accumulates && laws->is_mean(each)) {
        kind = Kind::mean;
      } else if (accumulates) {
        refuse_number(each.name);
      } else {
        kind = Kind::written;
      }
    }
    known_->learn(each.name, kind);
  }
}

}  // namespace infinitybatch
