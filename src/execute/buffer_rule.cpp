#include "execute/buffer_rule.hpp"

#include "core/bits.hpp"
#include "core/tensor_parts.hpp"
#include "core/tensor_values.hpp"
#include "core/torch_compat.hpp"
#include "execute/buffer_values.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

namespace infinitybatch {
namespace {

bool are_comparable(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() && b.defined() && can_be_compared(a) && can_be_compared(b);
}

/// Of tensors, those that are there.
std::vector<at::Tensor> copies_of_defined(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> defined;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined()) defined.push_back(tensor);
  }
  const std::vector<at::Tensor> made = copies_of(defined);
  std::vector<at::Tensor> copies(tensors.size());
  size_t next = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].defined()) copies[i] = made[next++];
  }
  return copies;
}

/// Values of many buffers, written as operators would: versions rise.
class Writes {
 public:
  void add(const BufferSlot& slot, const at::Tensor& tensor, const at::Tensor& values) {
    if (!tensor.defined() || !is_plain(tensor) || !is_plain(values)) {
      restore_buffer(slot, tensor, values);
      const bool counts = tensor.defined() && !tensor.is_inference();
      if (counts) tensor.unsafeGetTensorImpl()->bump_version();
      return;
    }
    if (!slot.get().is_same(tensor)) slot.set(tensor);
    resize_to(tensor, values);
    to_.push_back(tensor);
    from_.push_back(values);
  }
  void run() { copy_into(to_, from_); }

 private:
  std::vector<at::Tensor> to_, from_;
};

}  // namespace

BufferRule::BufferRule(std::vector<BufferSlot> slots, bool exact) : exact_(exact) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> tensors;
  for (BufferSlot& slot : slots) {
    Entry entry;
    entry.tensor = slot.get();
    if (entry.tensor.defined()) entry.version = version_of(entry.tensor);
    entry.slot = std::move(slot);
    tensors.push_back(entry.tensor);
    entries_.push_back(std::move(entry));
  }
  const std::vector<at::Tensor> copies = copies_of_defined(tensors);
  for (size_t i = 0; i < entries_.size(); ++i) entries_[i].initial = copies[i];
}

void BufferRule::note_means(const std::vector<coupled::SampleMean>& means, int64_t rows) {
  for (Entry& entry : entries_) {
    entry.weight_now = 0;
    for (const coupled::SampleMean& mean : means) {
      const bool each = mean.count > 0 && rows > 0 && mean.count % rows == 0;
      if (each && entry.tensor.defined() && entry.tensor.is_same(mean.buffer))
        entry.weight_now = mean.count;
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
  if (!sees_) see_micro_batch();
  restore(seen_);
  seen_.clear();
  sees_ = first_ = false;
}

void BufferRule::see_micro_batch() {
  const at::NoGradGuard no_grad;
  seen_.clear();
  sees_ = true;
  if (exact_ && !second_pass_) add_means();
  // Writes through `.data`, or by an op that does not tell (batch_norm), raise no version. Code
  // that does this once does it in the first micro-batch, so that values are compared only then.
  const bool looks = first_ && exact_ && !second_pass_;
  const std::set<size_t> silent = looks ? silently_written() : std::set<size_t>();
  std::vector<Entry*> fresh;
  std::vector<at::Tensor> left;
  for (size_t i = 0; i < entries_.size(); ++i) {
    Entry& entry = entries_[i];
    const at::Tensor now = entry.slot.get();
    const bool same = is_same(entry, now);
    if (second_pass_) {
      if (exact_ && (!same || entry.written)) seen_.push_back(&entry);
      continue;
    }
    if (same && !silent.contains(i) && !entry.written) continue;
    // Written now for the first time, though earlier micro-batches left it alone: they left
    // `initial`.
    if (!entry.written && !first_) entry.left = Left{entry.initial, {}};
    entry.written = true;
    entry.rebound = entry.rebound || !now.is_same(entry.tensor);
    if (!exact_) continue;
    if (entry.left) {
      compare(i, now);
    } else {
      left.push_back(now);
      fresh.push_back(&entry);
    }
    seen_.push_back(&entry);
  }
  disagreements_.flush();
  const std::vector<at::Tensor> copies = copies_of_defined(left);
  for (size_t i = 0; i < fresh.size(); ++i) {
    fresh[i]->left = left_of(*fresh[i], left[i], copies[i]);
  }
}

void BufferRule::compare(size_t index, const at::Tensor& now) {
  Entry& entry = entries_[index];
  const at::Tensor& before = entry.left->values;
  if (now.defined() && before.defined()) {
    disagreements_.note(index, before, now);
  } else {
    entry.apart = entry.apart || now.defined() != before.defined();
  }
}

/// \param copy of `now`
BufferRule::Left BufferRule::left_of(const Entry& entry, const at::Tensor& now,
                                     at::Tensor copy) const {
  Left left{std::move(copy), {}};
  if (!now.defined() || now.is_same(entry.tensor)) return left;
  // Other buffers may be views of it, or it of them. A view of something large alone, as of a row
  // of activations, is not worth holding it.
  const c10::StorageImpl* storage = storage_of(now);
  const bool whole =
      storage == nullptr || compat::bytes_in(*storage) <= 2 * static_cast<int64_t>(now.nbytes());
  const bool keep = whole || std::any_of(entries_.begin(), entries_.end(), [&](const Entry& other) {
                      return &other != &entry && (storage_of(other.slot.get()) == storage ||
                                                  storage_of(other.tensor) == storage);
                    });
  if (keep) left.put = now.is_leaf() ? now : now.detach();  // nobody goes back through it
  return left;
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
    if (!first_) entry.left = Left{entry.initial, {}};  // what earlier micro-batches left
  }
}

/// What forward leaves there, as far as it is known.
const at::Tensor& BufferRule::values_after(const Entry& entry) {
  if (entry.settled.defined()) return entry.settled;
  return entry.left ? entry.left->values : entry.initial;
}

/// Whether what forward leaves is to be written into the tensor that was there.
bool BufferRule::stays_in_place(const Entry& entry) {
  const at::Tensor& after = values_after(entry);
  return !entry.rebound && after.defined() && entry.tensor.defined() &&
         after.options().type_equal(entry.tensor.options());
}

/// Where it does not: another tensor, or none.
void BufferRule::put_in_place(const Entry& entry) {
  const at::Tensor& after = values_after(entry);
  if (!entry.settled.defined() && entry.left->put.defined()) {
    entry.slot.set(entry.left->put);
  } else {
    entry.slot.set(after.defined() ? value_of(after) : at::Tensor());  // others' may lie beside it
  }
}

/// Whether forward has left the memory of another buffer there (it swaps two), which has its own
/// values back since.
bool BufferRule::was_put_back(const Entry& entry) const {
  if (entry.settled.defined() || !entry.left || !entry.left->put.defined()) return false;
  const c10::StorageImpl* const storage = storage_of(entry.left->put);
  const bool meets =
      storage != nullptr && std::any_of(entries_.begin(), entries_.end(), [&](const Entry& other) {
        return other.written && storage_of(other.tensor) == storage;
      });
  // A parameter's memory, say, which nobody has written.
  return meets && any_bit_differs(entry.left->put, entry.left->values).item<bool>();
}

/// What forward leaves is there: slots first, for two of them may have changed places.
void BufferRule::put_all_in_place() {
  Writes writes;
  std::vector<const Entry*> left;
  for (const Entry& entry : entries_) {
    if (!entry.left && !entry.settled.defined()) continue;
    if (stays_in_place(entry)) {
      left.push_back(&entry);
    } else {
      put_in_place(entry);
      if (was_put_back(entry)) left.push_back(&entry);
    }
  }
  for (const Entry* entry : left) {
    const bool moved = !stays_in_place(*entry);
    writes.add(entry->slot, moved ? entry->left->put : entry->tensor, values_after(*entry));
  }
  writes.run();
}

void BufferRule::begin_loss() {
  if (!exact_) return;  // they hold it already
  const at::NoGradGuard no_grad;
  settle_means();
  for (const Entry& entry : entries_) {
    if (!entry.left && !entry.settled.defined()) continue;
    if (!stays_in_place(entry)) {
      put_in_place(entry);
      if (was_put_back(entry)) restore_buffer(entry.slot, entry.left->put, values_after(entry));
      continue;
    }
    restore_buffer(entry.slot, entry.tensor, values_after(entry));
  }
}

void BufferRule::end_loss() {
  if (!exact_) return;
  const at::NoGradGuard no_grad;
  // Values tell where versions do not: `.data`, batch_norm.
  BitDifferences values;
  for (size_t i = 0; i < entries_.size(); ++i) {
    const at::Tensor& before = values_after(entries_[i]);
    const at::Tensor now = entries_[i].slot.get();
    if (are_comparable(now, before)) values.note(i, before, now);
  }
  const std::set<size_t> differ = values.take();
  for (size_t i = 0; i < entries_.size(); ++i) {
    Entry& entry = entries_[i];
    const at::Tensor& before = values_after(entry);
    const at::Tensor now = entry.slot.get();
    bool changed = now.defined() != before.defined();
    if (now.defined() && before.defined()) {
      changed = are_comparable(now, before) ? differ.contains(i) : !is_same(entry, now);
    }
    const bool left = entry.left || entry.settled.defined();
    if (changed) {
      entry.rebound = entry.rebound || !now.is_same(entry.tensor);
      entry.left = left_of(entry, now, now.defined() ? value_of(now) : at::Tensor());
      entry.settled.reset();
      entry.left_by_loss = entry.written = true;
    }
    if (entry.left_by_loss || left) restore_unseen(entry);
  }
}

void BufferRule::begin_second_pass() {
  const at::NoGradGuard no_grad;
  second_pass_ = true;
  if (exact_) return;
  for (Entry& entry : entries_) {
    const at::Tensor now = entry.slot.get();
    entry.rebound = !now.is_same(entry.tensor);
    if (!now.defined() && !entry.rebound) continue;
    entry.left = left_of(entry, now, now.defined() ? value_of(now) : at::Tensor());
  }
}

/// Of those that seem to be what they were.
std::set<size_t> BufferRule::silently_written() const {
  BitDifferences values;
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Entry& entry = entries_[i];
    if (!entry.tensor.defined() || !can_be_compared(entry.tensor)) continue;
    if (!is_same(entry, entry.slot.get())) continue;
    values.note(i, entry.initial, entry.tensor);
  }
  return values.take();
}

const std::string* BufferRule::written_by_no_op() const {
  if (!first_ || !exact_ || second_pass_) return nullptr;
  const at::NoGradGuard no_grad;
  for (const size_t i : silently_written()) {
    if (!entries_[i].written) return &entries_[i].slot.name;
  }
  return nullptr;
}

bool BufferRule::is_same(const Entry& entry, const at::Tensor& now) {
  return now.is_same(entry.tensor) && (!now.defined() || version_of(now) == entry.version);
}

/// Written at least once in this step, perhaps without a new version.
void BufferRule::restore(const std::vector<Entry*>& entries) const {
  if (whole_) {
    for (Entry* entry : entries) restore_unseen(*entry);
    return;
  }
  Writes writes;
  for (Entry* entry : entries) {
    // Where forward has put another tensor there and left the one before alone, its version stays:
    // the memory may be a parameter's (`self.w = self.layer.weight.detach()`).
    const bool alone = entry->tensor.defined() && version_of(entry->tensor) == entry->version &&
                       !entry->slot.get().is_same(entry->tensor);
    if (alone) {
      restore_buffer(entry->slot, entry->tensor, entry->initial);
    } else {
      writes.add(entry->slot, entry->tensor, entry->initial);
    }
  }
  writes.run();
  for (Entry* entry : entries) {
    if (entry->tensor.defined()) entry->version = version_of(entry->tensor);
  }
}

/// Without raising the version: where nothing was written, graphs of others stay valid.
void BufferRule::restore_unseen(Entry& entry) {
  restore_buffer(entry.slot, entry.tensor, entry.initial);
  if (entry.tensor.defined()) entry.version = version_of(entry.tensor);
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
    if (!exact_ || !entry.left) {
      entry.left = Left{value, {}};
    } else {
      compare(i, value);
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

bool BufferRule::restores_memory() const noexcept {
  return std::any_of(entries_.begin(), entries_.end(),
                     [](const Entry& entry) { return entry.written && entry.tensor.defined(); });
}

bool BufferRule::rebinds() const {
  return std::any_of(entries_.begin(), entries_.end(),
                     [](const Entry& entry) { return !entry.slot.get().is_same(entry.tensor); });
}

void BufferRule::refuse(const Entry& entry) {
  const std::string& name = entry.slot.name;
  if (!entry.tensor.defined()) {
    throw CouplingError(
        name, "forward makes the buffer '" + name +
                  "' of its first batch, and each micro-batch would make another one, where the "
                  "whole batch makes one of all samples: run forward once over the whole first "
                  "batch in front of the first step, as in with torch.no_grad(): model(inputs), "
                  "or make the budget large enough for one micro-batch");
  }
  throw CouplingError(
      name, "buffer '" + name +
                "' depends on the samples, or counts them: micro-batches leave different values in "
                "it, so what the whole batch leaves is not known; call eval() on the module that "
                "owns it, or accept another value with batch_coupling=\"per_micro_batch\". If the "
                "first call alone writes it, run that over the whole batch in front of the first "
                "step: with torch.no_grad(): model(inputs)");
}

void BufferRule::commit() {
  const at::NoGradGuard no_grad;
  settle_means();
  const std::set<size_t> disagree = disagreements_.take();
  for (size_t i = 0; i < entries_.size(); ++i) {
    Entry& entry = entries_[i];
    if (!entry.settled.defined() && (entry.apart || disagree.contains(i))) refuse(entry);
  }
  put_all_in_place();
}

void BufferRule::roll_back() {
  const at::NoGradGuard no_grad;
  for (Entry& entry : entries_) {
    // Whatever the version says: batch_norm writes its running statistics without raising it.
    restore_unseen(entry);
    entry.written = entry.rebound = entry.apart = false;
    entry.left.reset();
    entry.settled.reset();
    entry.sum.reset();
    entry.weight = entry.weight_now = 0;
    entry.mean = true;
    entry.left_by_loss = false;
  }
  disagreements_.clear();
  seen_.clear();
  sees_ = false;
  first_ = true;
  second_pass_ = false;
}

}  // namespace infinitybatch
