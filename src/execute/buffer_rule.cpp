#include "execute/buffer_rule.hpp"

#include "core/bits.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

namespace infinitybatch {
BufferRule::BufferRule(std::vector<BufferSlot> slots, bool exact) : exact_(exact) {
  const at::NoGradGuard no_grad;
  for (BufferSlot& slot : slots) {
    Entry entry;
    entry.tensor = slot.get();
    if (!entry.tensor.defined()) continue;
    entry.initial = entry.tensor.detach().clone();
    entry.version = entry.tensor._version();
    entry.slot = std::move(slot);
    entries_.push_back(std::move(entry));
  }
}

void BufferRule::note_means(const std::vector<coupled::SampleMean>& means, int64_t rows) {
  for (Entry& entry : entries_) {
    entry.weight_now = 0;
    for (const coupled::SampleMean& mean : means) {
      const bool each = mean.count > 0 && rows > 0 && mean.count % rows == 0;
      if (each && entry.tensor.is_same(mean.buffer)) entry.weight_now = mean.count;
    }
  }
}

/// Called with what a micro-batch has left.
void BufferRule::add_means() {
  for (Entry& entry : entries_) {
    const int64_t weight = std::exchange(entry.weight_now, 0);
    entry.mean = entry.mean && weight > 0;
    if (!entry.mean) continue;
    const at::Tensor now = entry.slot.get().detach();
    const bool half = now.scalar_type() == at::kHalf || now.scalar_type() == at::kBFloat16;
    const at::Tensor share = (half ? now.to(at::kFloat) : now) * weight;
    entry.sum = entry.sum.defined() ? entry.sum.add(share) : share;
    entry.weight += weight;
  }
}

/// All micro-batches have been there.
void BufferRule::settle_means() {
  for (Entry& entry : entries_) {
    if (!entry.mean || entry.weight == 0 || entry.settled.defined() || entry.left_by_loss) continue;
    entry.settled = entry.sum.div(static_cast<double>(entry.weight)).to(entry.tensor.scalar_type());
  }
}

void BufferRule::end_micro_batch() {
  const at::NoGradGuard no_grad;
  if (exact_ && !second_pass_) add_means();
  for (Entry& entry : entries_) {
    const at::Tensor now = entry.slot.get();
    const bool same = now.is_same(entry.tensor) && now._version() == entry.version;
    if (second_pass_) {
      if (exact_ && (!same || entry.written)) restore(entry);
      continue;
    }
    // Writes through `.data`, or by an op that does not tell (batch_norm), raise no version. Code
    // that does this once does it in the first micro-batch, so that values are compared only then.
    const bool silent = same && first_ && exact_ && silently_written(entry);
    if (same && !silent && !entry.written) continue;
    // Written now for the first time, though earlier micro-batches left it alone: they left
    // `initial`.
    if (!entry.written && !first_) entry.left = entry.initial;
    entry.written = true;
    entry.rebound = entry.rebound || !now.is_same(entry.tensor);
    if (!exact_) continue;
    if (entry.left.defined()) {
      note_difference(entry.left, now, entry.disagree);
    } else {
      entry.left = now.detach().clone();
    }
    restore(entry);
  }
  first_ = false;
}

void BufferRule::end_other_rows() {
  const bool second_pass = std::exchange(second_pass_, false);
  const std::vector<Entry> before = entries_;  // means are of the step's own rows
  end_micro_batch();
  for (size_t i = 0; i < entries_.size(); ++i) {
    entries_[i].sum = before[i].sum;
    entries_[i].weight = before[i].weight;
    entries_[i].mean = before[i].mean;
  }
  second_pass_ = second_pass;
}

void BufferRule::note_write(const at::Tensor& buffer) {
  for (Entry& entry : entries_) {
    if (!entry.tensor.is_same(buffer) || entry.written) continue;
    entry.written = true;
    if (!first_) entry.left = entry.initial;  // what earlier micro-batches left
  }
}

void BufferRule::begin_loss() {
  if (!exact_) return;  // they hold it already
  const at::NoGradGuard no_grad;
  settle_means();
  for (Entry& entry : entries_) {
    const at::Tensor& after = entry.settled.defined() ? entry.settled : entry.left;
    if (!after.defined()) continue;
    if (!entry.rebound && after.options().type_equal(entry.tensor.options())) {
      resize_to(entry.tensor, after);
      entry.tensor.variable_data().copy_(after);
    } else {
      entry.slot.set(after.clone());
    }
  }
}

void BufferRule::end_loss() {
  if (!exact_) return;
  const at::NoGradGuard no_grad;
  for (Entry& entry : entries_) {
    const at::Tensor now = entry.slot.get();
    const at::Tensor& after = entry.settled.defined() ? entry.settled : entry.left;
    const at::Tensor& before = after.defined() ? after : entry.initial;
    // Values tell where versions do not: `.data`, batch_norm.
    const bool strided = now.layout() == at::kStrided && before.layout() == at::kStrided;
    const bool same = strided ? same_form(now, before) && at::equal(now, before)
                              : now.is_same(entry.tensor) && now._version() == entry.version;
    if (!same) {
      entry.rebound = entry.rebound || !now.is_same(entry.tensor);
      entry.left = now.detach().clone();
      entry.settled.reset();
      entry.left_by_loss = entry.written = true;
    }
    if (!same || after.defined()) restore_unseen(entry);
  }
}

void BufferRule::begin_second_pass() {
  const at::NoGradGuard no_grad;
  second_pass_ = true;
  if (exact_) return;
  for (Entry& entry : entries_) {
    const at::Tensor now = entry.slot.get();
    entry.left = now.detach().clone();
    entry.rebound = !now.is_same(entry.tensor);
  }
}

bool BufferRule::silently_written(const Entry& entry) {
  return entry.tensor.layout() == at::kStrided && !at::equal(entry.tensor, entry.initial);
}

void BufferRule::restore(Entry& entry) {
  if (!entry.slot.get().is_same(entry.tensor)) entry.slot.set(entry.tensor);
  // Written at least once in this step, perhaps without a new version.
  resize_to(entry.tensor, entry.initial);
  entry.tensor.copy_(entry.initial);
  entry.version = entry.tensor._version();
}

/// Without raising the version: where nothing was written, graphs of others stay valid.
void BufferRule::restore_unseen(Entry& entry) {
  if (!entry.slot.get().is_same(entry.tensor)) entry.slot.set(entry.tensor);
  resize_to(entry.tensor, entry.initial);
  entry.tensor.variable_data().copy_(entry.initial);
  entry.version = entry.tensor._version();
}

void BufferRule::settle(const at::Tensor& buffer, const at::Tensor& value) {
  for (Entry& entry : entries_) {
    if (entry.tensor.is_same(buffer) && !entry.left_by_loss) entry.settled = value;
  }
}

void BufferRule::meet(const at::Tensor& buffer, const at::Tensor& value) {
  if (second_pass_) return;  // the same program has left its values in the first
  const at::NoGradGuard no_grad;
  for (Entry& entry : entries_) {
    if (!entry.tensor.is_same(buffer)) continue;
    entry.written = true;
    if (!exact_ || !entry.left.defined()) {
      entry.left = value;
    } else {
      note_difference(entry.left, value, entry.disagree);
    }
  }
}

bool BufferRule::written() const noexcept {
  return std::any_of(entries_.begin(), entries_.end(),
                     [](const Entry& entry) { return entry.written; });
}

std::vector<at::Tensor> BufferRule::written_buffers() const {
  std::vector<at::Tensor> written;
  for (const Entry& entry : entries_) {
    if (entry.written && !entry.rebound) written.push_back(entry.tensor);
  }
  return written;
}

bool BufferRule::rebound() const noexcept {
  return std::any_of(entries_.begin(), entries_.end(),
                     [](const Entry& entry) { return entry.rebound; });
}

void BufferRule::commit() {
  const at::NoGradGuard no_grad;
  settle_means();
  for (Entry& entry : entries_) {
    if (entry.settled.defined()) {
      entry.left = entry.settled;
      continue;
    }
    if (entry.disagree.defined() && entry.disagree.item<bool>()) {
      throw CouplingError(
          entry.slot.name,
          "buffer '" + entry.slot.name +
              "' depends on the samples, or counts them: micro-batches leave different values in "
              "it, so what the whole batch leaves is not known; call eval() on the module that "
              "owns it, or accept another value with batch_coupling=\"per_micro_batch\"");
    }
  }
  for (Entry& entry : entries_) {
    if (!entry.left.defined()) continue;
    if (!entry.rebound && entry.left.options().type_equal(entry.tensor.options())) {
      if (!entry.slot.get().is_same(entry.tensor)) entry.slot.set(entry.tensor);
      resize_to(entry.tensor, entry.left);
      entry.tensor.copy_(entry.left);
    } else {
      entry.slot.set(entry.left);
    }
  }
}

void BufferRule::roll_back() {
  const at::NoGradGuard no_grad;
  for (Entry& entry : entries_) {
    // Whatever the version says: batch_norm writes its running statistics without raising it.
    restore_unseen(entry);
    entry.written = false;
    entry.rebound = false;
    entry.left.reset();
    entry.disagree.reset();
    entry.settled.reset();
    entry.sum.reset();
    entry.weight = entry.weight_now = 0;
    entry.mean = true;
    entry.left_by_loss = false;
  }
  first_ = true;
  second_pass_ = false;
}

}  // namespace infinitybatch
