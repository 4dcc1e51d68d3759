#include "core/small_tensors.hpp"

#include "core/bits.hpp"
#include "core/tensor_parts.hpp"
#include "core/tensor_values.hpp"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <array>
#include <utility>

namespace infinitybatch {
namespace {

using Kind = std::pair<at::ScalarType, at::Device>;

struct ByKind {
  bool operator()(const Kind& a, const Kind& b) const {
    if (a.first != b.first) return a.first < b.first;
    if (a.second.type() != b.second.type()) return a.second.type() < b.second.type();
    return a.second.index() < b.second.index();
  }
};

template <typename T>
using Groups = std::map<Kind, std::vector<T>, ByKind>;

Kind kind_of(const at::Tensor& tensor) {
  return {tensor.scalar_type(), tensor.device()};
}

/// What is larger is copied as fast alone, and is not worth being there once more.
bool is_small(const at::Tensor& tensor) {
  constexpr int64_t kMost = int64_t{64} << 10;
  return is_plain(tensor) && !tensor.is_meta() && tensor.numel() > 0 &&
         tensor.numel() * tensor.element_size() <= kMost && !has_repeats(tensor);
}

/// Integers that take as many bytes, which differ where a bit does: NaN equals NaN.
at::ScalarType bits_of(size_t bytes) {
  constexpr std::array kIntegers{at::kByte, at::kShort, at::kInt, at::kLong};
  size_t which = 0;
  while (which + 1 < kIntegers.size() && (size_t{1} << which) < bytes) ++which;
  return kIntegers[which];
}

/// Whether each begins where the one in front of it ends, as copies do.
bool lie_side_by_side(const std::vector<at::Tensor>& tensors) {
  int64_t at = tensors.front().storage_offset();
  return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    const bool here = tensor.is_alias_of(tensors.front()) && tensor.storage_offset() == at &&
                      tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
    at += tensor.numel();
    return here;
  });
}

at::Tensor copied_side_by_side(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> flat;
  flat.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    flat.push_back(tensor.detach().reshape({-1}).resolve_conj().resolve_neg());
  }
  return at::cat(flat);
}

/// Where they lie, if that is side by side.
at::Tensor side_by_side(const std::vector<at::Tensor>& tensors) {
  if (!lie_side_by_side(tensors)) return copied_side_by_side(tensors);
  int64_t count = 0;
  for (const at::Tensor& tensor : tensors) count += tensor.numel();
  return tensors.front().detach().as_strided({count}, {1});
}

}  // namespace

std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> copies(tensors.size());
  Groups<size_t> groups;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (is_small(tensors[i])) {
      groups[kind_of(tensors[i])].push_back(i);
    } else {
      copies[i] = value_of(tensors[i]);
    }
  }
  for (const auto& [kind, members] : groups) {
    std::vector<at::Tensor> given;
    for (const size_t i : members) given.push_back(tensors[i]);
    const at::Tensor row = copied_side_by_side(given);
    int64_t at = 0;
    for (const size_t i : members) {
      copies[i] = row.narrow(0, at, tensors[i].numel()).view(tensors[i].sizes());
      at += tensors[i].numel();
    }
  }
  return copies;
}

void copy_into(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& values) {
  struct Lists {
    std::vector<at::Tensor> to, from;
  };
  std::map<Kind, Lists, ByKind> lists;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!is_small(tensors[i]) || tensors[i].is_conj() || tensors[i].is_neg()) {
      if (has_repeats(tensors[i])) {
        put_back_counted(tensors[i], values[i]);
      } else {
        at::Tensor(tensors[i]).copy_(values[i]);
      }
      continue;
    }
    Lists& list = lists[kind_of(tensors[i])];
    list.to.push_back(tensors[i]);
    list.from.push_back(values[i]);
  }
  for (auto& [kind, list] : lists) at::_foreach_copy_(list.to, list.from);
}

void BitDifferences::note(size_t which, const at::Tensor& before, const at::Tensor& now) {
  if (!is_small(before) || !is_small(now) || !same_form(before, now)) {
    return note_difference(before, now, alone_[which]);
  }
  if (!names_.insert(which).second) {
    flush();
    names_.insert(which);
  }
  pending_.push_back({which, before, now});
}

void BitDifferences::flush() {
  const at::NoGradGuard no_grad;
  names_.clear();
  Groups<Pair> groups;
  for (Pair& pair : std::exchange(pending_, {})) groups[kind_of(pair.before)].push_back(pair);
  for (auto& [kind, members] : groups) compare(std::move(members));
}

void BitDifferences::compare(std::vector<Pair> members) {
  const auto tensors = [&](at::Tensor Pair::* which) {
    std::vector<at::Tensor> list;
    for (const Pair& member : members) list.push_back(member.*which);
    return list;
  };
  const at::Tensor now = side_by_side(tensors(&Pair::now));
  auto row = std::find_if(rows_.begin(), rows_.end(), [&](const Row& known) {
    return std::equal(members.begin(), members.end(), known.members.begin(), known.members.end(),
                      [](const Pair& a, const Pair& b) {
                        return a.which == b.which && a.before.is_same(b.before);
                      });
  });
  if (row == rows_.end()) {
    const at::Tensor before = side_by_side(tensors(&Pair::before));
    for (Pair& member : members) member.now.reset();
    row = rows_.insert(row, Row{std::move(members), before, {}});
  }
  const at::ScalarType bits = bits_of(now.element_size());
  const at::Tensor differs = at::ne(now.view(bits), row->before.view(bits));
  if (row->differs.defined()) {
    row->differs.logical_or_(differs);
  } else {
    row->differs = differs;
  }
}

std::set<size_t> BitDifferences::take() {
  constexpr int64_t kLargest = 8;  // of integers; complex numbers are two
  flush();
  std::set<size_t> found;
  for (const Row& row : rows_) {
    const at::Tensor differs = row.differs.cpu();
    const bool* each = differs.const_data_ptr<bool>();
    for (const Pair& member : row.members) {
      const int64_t size = member.before.element_size();
      const bool* end = each + member.before.numel() * std::max<int64_t>(1, size / kLargest);
      if (std::find(each, end, true) != end) found.insert(member.which);
      each = end;
    }
  }
  for (const auto& [which, differs] : alone_) {
    if (differs.item<bool>()) found.insert(which);
  }
  return found;
}

void BitDifferences::clear() {
  pending_.clear();
  names_.clear();
  rows_.clear();
  alone_.clear();
}

}  // namespace infinitybatch
