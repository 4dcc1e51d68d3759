// The part of PlainRuns that runs forward to learn how what it changes depends on the samples.
#include "execute/plain_runs.hpp"

#include "core/bits.hpp"
#include "core/out_of_memory.hpp"
#include "coupled/row_errors.hpp"
#include "execute/plain_refusals.hpp"

#include <infinitybatch/core/errors.hpp>

#include <algorithm>
#include <cmath>
#include <optional>

namespace infinitybatch {
namespace {

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

struct PlainRuns::Run {
  Batch outputs;
  Numbers numbers;
  std::map<std::string, std::string> objects;

  Run(Batch outputs, const PlainState& base) : outputs(std::move(outputs)) {
    for (PlainNumber& each : base.numbers()) numbers[each.name] = std::move(each);
    for (const PlainObject& each : base.objects()) objects[each.name] = each.describe();
  }
};

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
    const bool once =
        later && text_of(later->objects, each.name) == text_of(first.objects, each.name);
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
  // Activations are not held for the step.
  std::erase_if(parts_.left_with_leaves, [this](const Left& each) { return !stays(each); });
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
