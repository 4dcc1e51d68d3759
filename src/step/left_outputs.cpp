#include "step/left_outputs.hpp"

#include "core/following_dims.hpp"
#include "core/tensor_parts.hpp"
#include "execute/left_tensors.hpp"
#include "step/left_behind.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

namespace infinitybatch {
namespace {

using Known = std::unordered_set<const void*>;

const void* identity(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl();
}

using Tokens = std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>>;

/// Of what lies there: no other tensor is made at their addresses, but their memory may go.
Tokens tokens_of(const std::vector<LeftPlace>& places) {
  Tokens tokens;
  for (const LeftPlace& place : places) {
    for (const at::Tensor& tensor : place.tensors) {
      if (tensor.defined()) tokens.emplace_back(tensor.getIntrusivePtr());
    }
  }
  return tokens;
}

bool is_ordinary(const at::Tensor& tensor) {
  return is_plain(tensor) && !(tensor.requires_grad() && tensor.is_leaf());
}

bool follows(const at::Tensor& tensor, int64_t rows) {
  const auto sizes = tensor.sizes();
  return tensor.numel() > 0 && std::find(sizes.begin(), sizes.end(), rows) != sizes.end();
}

/// Positions in a place of what a forward has put there.
std::vector<size_t> added(const LeftPlace& place, const Known& before) {
  std::vector<size_t> found;
  for (size_t i = 0; i < place.tensors.size(); ++i) {
    const at::Tensor& tensor = place.tensors[i];
    if (tensor.defined() && !before.contains(identity(tensor))) found.push_back(i);
  }
  return found;
}

const LeftPlace* find(const std::vector<LeftPlace>& places, const std::string& name, bool list) {
  const auto found = std::find_if(places.begin(), places.end(), [&](const LeftPlace& place) {
    return place.name == name && place.list == list;
  });
  return found == places.end() ? nullptr : &*found;
}

/// Some of its values, few, for plans would count them for each sample.
at::Tensor few_of(const at::Tensor& tensor) {
  constexpr int64_t kFew = 32;
  if (!is_ordinary(tensor)) return {};
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard unseen(false);
  const at::Tensor values = tensor.detach();
  if (values.numel() <= kFew) return values.clone();
  if (!values.is_contiguous()) return {};
  return values.view({-1}).slice(0, 0, values.numel(), values.numel() / kFew).clone();
}

[[noreturn]] void refuse_other(const std::string& place) {
  throw BatchError("forward leaves other tensors in '" + place +
                   "' for one micro-batch than for another, so they cannot be joined");
}

}  // namespace

LeftOutputs::LeftOutputs(Look look, int64_t total, int64_t most, bool lists)
    : look_(std::move(look)), total_(total), most_(most), lists_(lists) {}

void LeftOutputs::adopt(std::vector<Entry> entries) {
  if (entries.empty()) return;
  decided_ = true;
  entries_ = std::move(entries);
  items_.resize(entries_.size());
  for (const Entry& entry : entries_) appended_ += entry.same_output < 0 ? 1 : 0;
}

Batch LeftOutputs::with_left(int64_t rows, const std::function<Batch()>& forward) {
  if (!look_ || idle_ || (!decided_ && rows >= total_)) return forward();
  const Tokens held = tokens_of(look_());
  Known before;
  for (const auto& token : held) before.insert(token._unsafe_get_target());
  Batch outputs = forward();
  const std::vector<LeftPlace> now = look_();
  std::vector<at::Tensor> tensors;
  if (!decided_) {
    decide(rows, outputs, now, before, tensors);
  } else {
    meet(now, before, tensors);
  }
  return append(std::move(outputs), tensors);
}

void LeftOutputs::decide(int64_t rows, const Batch& outputs, const std::vector<LeftPlace>& now,
                         const Known& before, std::vector<at::Tensor>& tensors) {
  decided_ = true;
  int64_t bytes = 0;
  for (const LeftPlace& place : now) {
    const std::vector<size_t> here = added(place, before);
    for (size_t i = 0; i < here.size(); ++i) {
      const at::Tensor& tensor = place.tensors[here[i]];
      if (!is_ordinary(tensor)) continue;
      const auto output =
          std::find_if(outputs.leaves().begin(), outputs.leaves().end(), [&](const Leaf& leaf) {
            return leaf.tensor.defined() && identity(leaf.tensor) == identity(tensor);
          });
      const bool given = output != outputs.leaves().end();
      const int64_t whole = static_cast<int64_t>(tensor.nbytes()) / rows * total_;
      const bool no_room = !given && (!follows(tensor, rows) || bytes + whole > most_);
      if (no_room || (place.list && !lists_)) {
        const at::Tensor sample = few_of(tensor);
        others_.push_back({place.name, place.list, i, sample, sample, sample, false});
        continue;
      }
      Entry entry{place.name, i, place.list};
      if (given) entry.same_output = output - outputs.leaves().begin();
      entries_.push_back(entry);
      entries_.back().has_graph = tensor.requires_grad();
      items_.emplace_back();
      if (place.list) items_.back().emplace_back(tensor.getIntrusivePtr());
      if (given) continue;
      bytes += whole;
      tensors.push_back(tensor.detach());
    }
  }
  appended_ = tensors.size();
  idle_ = entries_.empty() && others_.empty();
}

void LeftOutputs::meet(const std::vector<LeftPlace>& now, const Known& before,
                       std::vector<at::Tensor>& tensors) {
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Entry& entry = entries_[i];
    const LeftPlace* place = find(now, entry.place, entry.list);
    if (place == nullptr) refuse_other(entry.place);
    size_t at = 0;
    if (entry.list) {
      const std::vector<size_t> here = added(*place, before);
      if (entry.index >= here.size()) refuse_other(entry.place);
      at = here[entry.index];
    }
    const at::Tensor& tensor = place->tensors[at];
    if (!tensor.defined() || !is_ordinary(tensor)) refuse_other(entry.place);
    if (entry.list) items_[i].emplace_back(tensor.getIntrusivePtr());
    entries_[i].has_graph = entry.has_graph || tensor.requires_grad();
    if (entry.same_output < 0) tensors.push_back(tensor.detach());
  }
  note_others(now, before);
}

void LeftOutputs::note_others(const std::vector<LeftPlace>& now, const Known& before) {
  for (Other& other : others_) {
    const LeftPlace* place = find(now, other.place, other.list);
    if (place == nullptr) continue;
    const std::vector<size_t> here = added(*place, before);
    if (other.index < here.size()) other.seen = few_of(place->tensors[here[other.index]]);
  }
}

Batch LeftOutputs::append(Batch outputs, const std::vector<at::Tensor>& tensors) {
  if (tensors.empty()) return outputs;
  std::vector<std::string> names;
  for (size_t i = 0; i < outputs.leaves().size(); ++i) {
    names.push_back(outputs.structure()->leaf_name(i));
  }
  std::vector<Leaf> leaves = outputs.leaves();
  size_t at = 0;
  for (const Entry& entry : entries_) {
    if (entry.same_output >= 0) continue;
    names.push_back(" ('" + entry.place + "')");
    leaves.push_back({tensors[at++], {}, 0});
  }
  // What takes it off again puts the structure back, too.
  return {std::move(leaves), Structure::foreign(outputs.structure(), std::move(names))};
}

Batch LeftOutputs::without_left(Batch outputs, bool keep, bool copies) {
  for (Other& other : others_) {
    if (keep) other.last = other.seen;
  }
  if (appended_ == 0) return outputs;
  const auto* own = std::any_cast<std::shared_ptr<const Structure>>(&outputs.structure()->tree());
  if (own == nullptr) return outputs;
  const std::shared_ptr<const Structure> structure = *own;
  std::vector<Leaf> leaves = outputs.leaves();
  const auto end = leaves.end() - static_cast<std::ptrdiff_t>(appended_);
  if (keep) {
    std::vector<Leaf> left(end, leaves.end());
    const at::NoGradGuard no_grad;
    const at::RecordFunctionGuard unseen(false);
    Batch part = detached(Batch(left, Structure::foreign({}, std::vector<std::string>(appended_))));
    for (Leaf& leaf : part.leaves()) {
      if (copies) leaf.tensor = leaf.tensor.clone();
    }
    parts_.push_back(std::move(part));
  }
  leaves.erase(end, leaves.end());
  return {std::move(leaves), structure};
}

bool LeftOutputs::is_ambiguous(int64_t rows) const {
  if (parts_.empty()) return false;
  const std::vector<Batch> first{parts_.front()};
  for (size_t leaf = 0; leaf < appended_; ++leaf) {
    if (following_dims(first, {rows}, leaf).size() > 1) return true;
  }
  return false;
}

/// Whether a forward has put it into a list.
bool LeftOutputs::is_item(size_t entry, const at::Tensor& tensor) const {
  return std::any_of(items_[entry].begin(), items_[entry].end(), [&](const auto& item) {
    return item._unsafe_get_target() == tensor.unsafeGetTensorImpl();
  });
}

void LeftOutputs::hand_out(const std::vector<int64_t>& row_counts, const Batch& outputs,
                           const Arrange& arrange) {
  if (entries_.empty() ||
      parts_.size() + (appended_ == 0 ? row_counts.size() : 0) != row_counts.size()) {
    return;
  }
  const std::vector<LeftPlace> now = look_();
  size_t leaf = 0;
  std::vector<std::pair<const LeftPlace*, size_t>> erased;
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Entry& entry = entries_[i];
    const bool given = entry.same_output >= 0;
    const size_t here = given ? 0 : leaf++;
    const LeftPlace* place = find(now, entry.place, entry.list);
    if (place == nullptr) continue;
    at::Tensor joined;
    if (given) {
      joined = outputs.leaves()[static_cast<size_t>(entry.same_output)].tensor;
    } else {
      std::vector<at::Tensor> tensors;
      for (const Batch& part : parts_) tensors.push_back(part.leaves()[here].tensor);
      const bool alike = std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& each) {
        return same_sample(tensors.front(), each);
      });
      if (alike) continue;  // a table, the same for all samples
      const std::vector<int64_t> dims = following_dims(parts_, row_counts, here);
      const bool square = dims.size() > 1 && (row_counts.front() > 1 || tensors[0].dim() > 2);
      if (dims.empty() || square) {
        others_.push_back({entry.place, entry.list, entry.index, {}, {}, {}, true});
        continue;
      }
      joined = at::cat(tensors, dims.front());
      if (arrange) joined = arrange(joined, dims.front());
      if (entry.has_graph) joined = without_way_back(joined);
    }
    if (!entry.list) {
      place->put(0, joined);
      continue;
    }
    // Natively there is one for the whole batch, where its last micro-batch's lies.
    std::vector<size_t> here_now;
    for (size_t at = 0; at < place->tensors.size(); ++at) {
      const at::Tensor& tensor = place->tensors[at];
      if (tensor.defined() && is_item(i, tensor)) here_now.push_back(at);
    }
    for (size_t j = 0; j < here_now.size(); ++j) {
      if (j + 1 == here_now.size()) {
        place->put(here_now[j], joined);
      } else {
        erased.emplace_back(place, here_now[j]);
      }
    }
  }
  for (const LeftPlace& place : now) {
    std::vector<size_t> indices;
    for (const auto& [from, at] : erased) {
      if (from == &place) indices.push_back(at);
    }
    std::sort(indices.begin(), indices.end());
    if (!indices.empty()) place.erase(indices);
  }
}

std::vector<std::string> LeftOutputs::not_joined() const {
  std::vector<std::string> names;
  for (const Other& other : others_) {
    if (!other.certain && same_sample(other.first, other.last)) continue;
    if (std::find(names.begin(), names.end(), other.place) == names.end()) {
      names.push_back(other.place);
    }
  }
  return names;
}

}  // namespace infinitybatch
