#include "execute/trimming.hpp"

#include "core/sample_rows.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <utility>

namespace infinitybatch {
namespace {

at::Tensor narrowed(const at::Tensor& tensor, int64_t dim, int64_t length, bool left) {
  return tensor.narrow(dim, left ? tensor.size(dim) - length : 0, length);
}

/// What `narrowed` leaves.
at::Tensor cut_off(const at::Tensor& tensor, int64_t dim, int64_t length, bool left) {
  return tensor.narrow(dim, left ? 0 : length, tensor.size(dim) - length);
}

/// Forward finds memory of its own, as natively: it may ask for a view of all of it.
void trim(std::vector<Leaf>& leaves, const std::vector<Trimming::Along>& along, int64_t length,
          bool left, bool copies) {
  for (const auto& [leaf, dim] : along) {
    at::Tensor& tensor = leaves[leaf].tensor;
    tensor = narrowed(tensor, dim, length, left);
    tensor = copies ? tensor.clone(at::MemoryFormat::Contiguous) : tensor.contiguous();
  }
}

}  // namespace

bool Trimming::changes_nothing() const {
  if (sizes.size() > 1 || !std::is_sorted(order.begin(), order.end())) return false;
  const Rows all{0, static_cast<int64_t>(order.size())};
  return std::none_of(sequences.begin(), sequences.end(), [&](const Sequence& sequence) {
    return sizes.empty() ? !trimmed_rows(sequence).empty() : trims(sequence, all);
  });
}

bool Trimming::knows_outputs() const {
  return std::all_of(sequences.begin(), sequences.end(), [](const Sequence& sequence) {
    return sequence.inputs.empty() || !sequence.targets.empty() || sequence.outputs;
  });
}

int64_t Trimming::length(const Sequence& sequence, Rows rows) const {
  const auto begin = sequence.lengths.begin();
  const int64_t longest = *std::max_element(begin + rows.begin, begin + rows.end);
  return std::min(sequence.full, std::max(longest, at_least));
}

std::vector<int64_t> Trimming::trimmed_rows(const Sequence& sequence, int64_t turn) const {
  constexpr size_t kMost = 4;
  const auto first = sequence.lengths.begin();
  std::vector<int64_t> longest;  // of each micro-batch that is trimmed
  const std::vector<int64_t> singles(sizes.empty() ? sequence.lengths.size() : 0, 1);
  int64_t begin = 0;
  for (const int64_t size : sizes.empty() ? singles : sizes) {
    const int64_t row = std::max_element(first + begin, first + begin + size) - first;
    if (trims(sequence, {row, row + 1})) longest.push_back(row);
    begin += size;
  }
  if (longest.size() <= kMost) return longest;
  std::vector<int64_t> some;
  for (size_t i = 0; i < kMost; ++i) {
    const size_t place = i * (longest.size() - 1) / (kMost - 1) + static_cast<size_t>(turn);
    some.push_back(longest[place % longest.size()]);
  }
  return some;
}

Batch Trimming::trimmed(const Batch& batch, Rows rows,
                        std::vector<Along> Sequence::* const along) const {
  std::vector<Leaf> leaves = batch.leaves();
  for (const Sequence& sequence : sequences) {
    if (!planned && !trims(sequence, rows)) continue;
    trim(leaves, sequence.*along, length(sequence, rows), sequence.left, planned);
  }
  return {std::move(leaves), batch.structure()};
}

Batch Trimming::inputs(const Batch& batch, Rows rows) const {
  return trimmed(batch, rows, &Sequence::inputs);
}

Batch Trimming::targets(const Batch& batch, Rows rows) const {
  return trimmed(batch, rows, &Sequence::targets);
}

Batch Trimming::inputs(const Batch& batch, const Sequence& sequence, int64_t length) {
  std::vector<Leaf> leaves = batch.leaves();
  trim(leaves, sequence.inputs, length, sequence.left, /*copies=*/false);
  return {std::move(leaves), batch.structure()};
}

Batch Trimming::padded(const Batch& outputs, const Batch& inputs) const {
  std::vector<Leaf> leaves = outputs.leaves();
  for (const Sequence& sequence : sequences) {
    if (sequence.inputs.empty() || !sequence.targets.empty()) continue;
    const Along& first = sequence.inputs.front();
    const int64_t length = inputs.leaves()[first.leaf].tensor.size(first.dim);
    if (length == sequence.full && !(planned && sequence.outputs)) continue;
    if (!sequence.outputs) throw StateError("outputs were trimmed before it was known where");
    for (size_t i = 0; i < sequence.outputs->along.size(); ++i) {
      const auto& [leaf, dim] = sequence.outputs->along[i];
      at::Tensor& tensor = leaves[leaf].tensor;
      if (!tensor.defined() || dim >= tensor.dim() || tensor.size(dim) != length) {
        std::ostringstream text;
        text << "outputs" << outputs.structure()->leaf_name(leaf);
        if (tensor.defined()) text << " has shape " << tensor.sizes();
        text << " where inputs were trimmed to " << length << " of " << sequence.full
             << " positions, and dimension " << dim
             << " followed them before: it cannot be padded back; leave trim out, or pool over "
                "time inside of the model";
        throw BatchError(text.str());
      }
      std::vector<int64_t> pad(static_cast<size_t>(2 * (tensor.dim() - dim)), 0);
      pad[pad.size() - (sequence.left ? 2 : 1)] = sequence.full - length;
      // Of nothing to pad it gives a copy as the tensor lies, else a contiguous one.
      if (planned) tensor = tensor.contiguous();
      const double fill = tensor.is_floating_point() ? sequence.outputs->fills[i] : 0;
      tensor = at::constant_pad_nd(tensor, pad, fill);
    }
  }
  return {std::move(leaves), outputs.structure()};
}

void Trimming::sort_by(std::vector<int64_t> rows) {
  order = std::move(rows);
  reorders = !std::is_sorted(order.begin(), order.end());
  back_.resize(order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    back_[static_cast<size_t>(order[i])] = static_cast<int64_t>(i);
  }
}

Batch Trimming::sorted(const Batch& batch) const {
  return in_order(batch, order);
}

Batch Trimming::unsorted(const Batch& batch) const {
  return in_order(batch, back_);
}

at::Tensor Trimming::unsorted(const at::Tensor& tensor, int64_t dim) const {
  return in_order(tensor, dim, back_);
}

std::vector<int64_t> Trimming::samples(Rows rows) const {
  return {order.begin() + rows.begin, order.begin() + rows.end};
}

bool Trimming::pads(size_t leaf) const {
  return std::any_of(sequences.begin(), sequences.end(), [&](const Sequence& sequence) {
    if (!sequence.outputs || !sequence.targets.empty()) return false;
    const std::vector<Along>& along = sequence.outputs->along;
    return std::any_of(along.begin(), along.end(),
                       [&](const Along& each) { return each.leaf == leaf; });
  });
}

void Trimming::check_gradient(size_t leaf, int64_t batch_dim, const at::Tensor& gradient,
                              std::optional<Rows> rows) const {
  if (!gradient.defined()) return;
  const at::NoGradGuard no_grad;
  at::Tensor read;
  for (const Sequence& sequence : sequences) {
    if (!sequence.outputs || !sequence.targets.empty()) continue;
    for (const auto& [of, dim] : sequence.outputs->along) {
      if (of != leaf || dim >= gradient.dim() || gradient.size(dim) != sequence.full) continue;
      int64_t row = rows ? rows->begin : 0;
      const auto meet = [&](Rows here, const at::Tensor& part) {
        const bool trimmed = trims(sequence, here);
        if (!planned && !trimmed) return;
        // Where nothing is cut off a planned micro-batch does the same to memory.
        at::Tensor cut = trimmed ? cut_off(part, dim, length(sequence, here), sequence.left)
                                 : part.narrow(dim, 0, std::min<int64_t>(1, part.size(dim)));
        if (cut.numel() == 0) return;
        if (cut.is_complex()) cut = at::view_as_real(cut);
        // Without a copy of it. What is not a number comes of a padding's zero beside an infinity:
        // native has it too.
        const at::Tensor any = cut.amax().gt(0).logical_or(cut.amin().lt(0));
        if (!trimmed) return;
        read = read.defined() ? read.logical_or(any) : any;
      };
      if (rows) {
        meet(*rows, gradient);
        continue;
      }
      for (const int64_t size : sizes) {
        const Rows here{row, row + size};
        meet(here, batch_dim < 0 ? gradient : gradient.narrow(batch_dim, row, size));
        row += size;
      }
    }
  }
  if (!read.defined() || !read.item<bool>()) return;
  throw BatchError("the loss takes something from positions of outputs[" + std::to_string(leaf) +
                   "] that trim= has cut off as padding, where natively the model's own values "
                   "stand: mask them in the loss, as in (loss * mask).sum() / mask.sum() or "
                   "ignore_index=-100, or leave trim out");
}

}  // namespace infinitybatch
