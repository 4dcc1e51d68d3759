#include "execute/buffer_rule.hpp"

#include "core/bits.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

namespace infinitybatch {
namespace {

bool are_strided(const at::Tensor& a, const at::Tensor& b) {
  return a.layout() == at::kStrided && b.layout() == at::kStrided;
}

}  // namespace

BufferRule::BufferRule(std::vector<BufferSlot> slots, bool exact) : exact_(exact) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> tensors;
  for (BufferSlot& slot : slots) {
    Entry entry;
    entry.tensor = slot.get();
    if (!entry.tensor.defined()) continue;
    entry.version = entry.tensor._version();
    entry.slot = std::move(slot);
    tensors.push_back(entry.tensor);
    entries_.push_back(std::move(entry));
  }
  const std::vector<at::Tensor> copies = copies_of(tensors);
  for (size_t i = 0; i < entries_.size(); ++i) entries_[i].initial = copies[i];
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
  // Writes through `.data`, or by an op that does not tell (batch_norm), raise no version. Code
  // that does this once does it in the first micro-batch, so that values are compared only then.
  const bool looks = first_ && exact_ && !second_pass_;
  const std::set<size_t> silent = looks ? silently_written() : std::set<size_t>();
  std::vector<Entry*> written, fresh;
  std::vector<at::Tensor> left;
  for (size_t i = 0; i < entries_.size(); ++i) {
    Entry& entry = entries_[i];
    const at::Tensor now = entry.slot.get();
    const bool same = is_same(entry, now);
    if (second_pass_) {
      if (exact_ && (!same || entry.written)) written.push_back(&entry);
      continue;
    }
    if (same && !silent.contains(i) && !entry.written) continue;
    // Written now for the first time, though earlier micro-batches left it alone: they left
    // `initial`.
    if (!entry.written && !first_) entry.left = entry.initial;
    entry.written = true;
    entry.rebound = entry.rebound || !now.is_same(entry.tensor);
    if (!exact_) continue;
    if (entry.left.defined()) {
      disagreements_.note(i, entry.left, now);
    } else {
      left.push_back(now);
      fresh.push_back(&entry);
    }
    written.push_back(&entry);
  }
  disagreements_.flush();
  const std::vector<at::Tensor> copies = copies_of(left);
  for (size_t i = 0; i < fresh.size(); ++i) fresh[i]->left = copies[i];
  restore(written);
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
  // Values tell where versions do not: `.data`, batch_norm.
  BitDifferences values;
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Entry& entry = entries_[i];
    const at::Tensor& after = entry.settled.defined() ? entry.settled : entry.left;
    const at::Tensor& before = after.defined() ? after : entry.initial;
    const at::Tensor now = entry.slot.get();
    if (are_strided(now, before)) values.note(i, before, now);
  }
  const std::set<size_t> differ = values.take();
  for (size_t i = 0; i < entries_.size(); ++i) {
    Entry& entry = entries_[i];
    const at::Tensor now = entry.slot.get();
    const at::Tensor& after = entry.settled.defined() ? entry.settled : entry.left;
    const bool strided = are_strided(now, after.defined() ? after : entry.initial);
    if (strided ? differ.contains(i) : !is_same(entry, now)) {
      entry.rebound = entry.rebound || !now.is_same(entry.tensor);
      entry.left = now.detach().clone();
      entry.settled.reset();
      entry.left_by_loss = entry.written = true;
    }
    if (entry.left_by_loss || after.defined()) restore_unseen(entry);
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

/// Of those that seem to be what they were.
std::set<size_t> BufferRule::silently_written() const {
  BitDifferences values;
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Entry& entry = entries_[i];
    if (entry.tensor.layout() != at::kStrided || !is_same(entry, entry.slot.get())) continue;
    values.note(i, entry.initial, entry.tensor);
  }
  return values.take();
}

bool BufferRule::is_same(const Entry& entry, const at::Tensor& now) {
  return now.is_same(entry.tensor) && now._version() == entry.version;
}

/// Written at least once in this step, perhaps without a new version.
void BufferRule::restore(const std::vector<Entry*>& entries) {
  std::vector<at::Tensor> to, from;
  for (Entry* entry : entries) {
    if (!entry->slot.get().is_same(entry->tensor)) entry->slot.set(entry->tensor);
    resize_to(entry->tensor, entry->initial);
    to.push_back(entry->tensor);
    from.push_back(entry->initial);
  }
  copy_into(to, from);
  for (Entry* entry : entries) entry->version = entry->tensor._version();
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
  for (size_t i = 0; i < entries_.size(); ++i) {
    Entry& entry = entries_[i];
    if (!entry.tensor.is_same(buffer)) continue;
    entry.written = true;
    if (!exact_ || !entry.left.defined()) {
      entry.left = value;
    } else {
      disagreements_.note(i, entry.left, value);
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
  const std::set<size_t> disagree = disagreements_.take();
  for (size_t i = 0; i < entries_.size(); ++i) {
    Entry& entry = entries_[i];
    if (entry.settled.defined()) {
      entry.left = entry.settled;
      continue;
    }
    if (disagree.contains(i)) {
      throw CouplingError(
          entry.slot.name,
          "buffer '" + entry.slot.name +
              "' depends on the samples, or counts them: micro-batches leave different values in "
              "it, so what the whole batch leaves is not known; call eval() on the module that "
              "owns it, or accept another value with batch_coupling=\"per_micro_batch\"");
    }
  }
  std::vector<at::Tensor> to, from;
  for (Entry& entry : entries_) {
    if (!entry.left.defined()) continue;
    if (!entry.rebound && entry.left.options().type_equal(entry.tensor.options())) {
      if (!entry.slot.get().is_same(entry.tensor)) entry.slot.set(entry.tensor);
      resize_to(entry.tensor, entry.left);
      to.push_back(entry.tensor);
      from.push_back(entry.left);
    } else {
      entry.slot.set(entry.left.clone());  // others' may lie beside it
    }
  }
  copy_into(to, from);
}

void BufferRule::roll_back() {
  const at::NoGradGuard no_grad;
  for (Entry& entry : entries_) {
    // Whatever the version says: batch_norm writes its running statistics without raising it.
    restore_unseen(entry);
    entry.written = false;
    entry.rebound = false;
    entry.left.reset();
    entry.settled.reset();
    entry.sum.reset();
    entry.weight = entry.weight_now = 0;
    entry.mean = true;
    entry.left_by_loss = false;
  }
  disagreements_.clear();
  first_ = true;
  second_pass_ = false;
}

}  // namespace infinitybatch
