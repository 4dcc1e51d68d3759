#include "execute/plain_runs.hpp"

#include "core/tensor_parts.hpp"
#include "execute/plain_refusals.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>

namespace infinitybatch {
namespace {

bool has_nan(const at::Tensor& tensor) {
  return is_plain(tensor) && !tensor.is_meta() && tensor.detach().isnan().any().item<bool>();
}

}  // namespace

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
    if (stays(each)) each.put_in();
  }
}

bool PlainRuns::stays(const Left& left) const {
  const Kind kind = known_->kind_of(left.name);
  return kind == Kind::once || (left.is_number && kind == Kind::kept);
}

/// It collects the gradients of all, and with it stays the flag that says that it is there.
bool PlainRuns::leaves_stay() const {
  const std::vector<Left>& left = parts_.left_with_leaves;
  return std::any_of(left.begin(), left.end(),
                     [this](const Left& each) { return each.holds_leaves && stays(each); });
}

/// Forward cannot go on from them alone: from now on they are put back as all else.
void PlainRuns::refuse_leaves() const {
  std::string name;
  for (const Left& each : parts_.left_with_leaves) {
    if (!each.holds_leaves || !stays(each)) continue;
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
      // What a micro-batch has no number for (a deviation of one sample) the whole batch may have.
      if (!known && has_nan(leaf.tensor)) refuse_nan(each.name);
      if (!known) made.push_back(leaf.tensor);
    }
  }
  if (!any || !first) return;
  const auto keep = [this](Left left) {
    const bool may_stay = known_->kind_of(left.name) == Kind::unknown || stays(left);
    if (left.put_in && may_stay) parts_.left_with_leaves.push_back(std::move(left));
  };
  for (const PlainNumber& each : moved_) keep({each.name, each.put_in, true, false});
  for (const PlainObject& each : replaced_) {
    keep({each.name, each.put_in, false, !each.leaves.empty()});
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

}  // namespace infinitybatch
