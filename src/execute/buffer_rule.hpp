#pragma once

#include "core/check.hpp"
#include "core/small_tensors.hpp"
#include "coupled/sample_means.hpp"

#include <infinitybatch/core/model.hpp>

#include <cstddef>
#include <optional>
#include <set>
#include <vector>

namespace infinitybatch {

/// Every micro-batch starts from the buffers that the step began with, and a buffer that all of
/// them leave equal is written once: as in one native forward over the whole batch (spectral_norm's
/// vectors, step counters, a mask that the first call makes). Buffers that they leave unequal
/// couple the samples: a typed error. A slot that holds nothing is a value like any other.
///
/// Holds a copy of every buffer during the step. Parameters are not covered.
class BufferRule final : public Check {
 public:
  /// \param exact without it the buffers of one micro-batch carry on into the next
  BufferRule(std::vector<BufferSlot> slots, bool exact);

  /// In front of `end_micro_batch`: what it has moved these buffers by is a mean over its rows, so
  /// that what micro-batches leave adds up. Holds where all of them say so.
  void note_means(const std::vector<coupled::SampleMean>& means, int64_t rows);

  void see_micro_batch() override;
  void end_micro_batch() override;

  /// The micro-batch at work is all of the batch. No other one begins from what it found, and a
  /// loss that reads what forward kept (by a hook, in an attribute) goes back through this graph:
  /// versions stay, and `begin_loss` puts back the values that the graph knows.
  void note_whole(bool whole) noexcept { whole_ = whole; }

  /// The same for rows that ran beside the step's, in the second pass too: what they leave has to
  /// be what micro-batches left.
  void end_other_rows();

  /// A tape has this buffer written, perhaps without a new version and with the values that it had.
  void note_write(const at::Tensor& buffer);

  /// A loss of all outputs is about to run: it finds what forward over the whole batch leaves.
  void begin_loss();

  /// It has run. What it wrote is what the step leaves; forwards that run again find what they
  /// found the first time, and graphs that are kept stay valid.
  void end_loss();

  void begin_second_pass() override;

  /// Micro-batches need not agree on this buffer: an op of the whole batch has computed what it
  /// leaves there.
  void settle(const at::Tensor& buffer, const at::Tensor& value);

  /// What a micro-batch would leave in this buffer, where its program ran without writing it.
  void meet(const at::Tensor& buffer, const at::Tensor& value);

  /// Whether any micro-batch has written a buffer.
  bool written() const noexcept;

  /// Those that one has written, where no other tensor was put into their place.
  std::vector<at::Tensor> written_buffers() const;

  /// The name of one that the first micro-batch has changed, though no op is known to have (NumPy,
  /// a pointer); null where there is none.
  const std::string* written_by_no_op() const;

  /// Whether restoring writes into memory that graphs may have saved.
  bool restores_memory() const noexcept;
  /// Whether forward has put another tensor, or none, into a buffer's place, as no tape does.
  bool rebinds() const;

  void commit() override;
  void roll_back() override;
  void let_go() override {
    entries_.clear();
    seen_.clear();
    disagreements_.clear();
  }

 private:
  /// What forward leaves in a slot.
  struct Left {
    at::Tensor values;  // a copy; undefined where it leaves nothing there
    at::Tensor put;     // the tensor itself, where it is another one than before
  };
  struct Entry {
    BufferSlot slot;
    at::Tensor tensor;   // the tensor object that was there; undefined where there was none
    at::Tensor initial;  // a copy of its values
    uint32_t version = 0;
    bool written = false;
    bool rebound = false;       // another tensor, or none, was put into the slot
    bool apart = false;         // some micro-batches left a tensor there, others none
    std::optional<Left> left;   // what the first micro-batch left; nothing before
    at::Tensor settled;         // by an op of the whole batch
    at::Tensor sum;             // of what micro-batches left, each times its weight
    int64_t weight = 0;         // of all of them
    int64_t weight_now = 0;     // of the one that is about to end; 0 where it is no mean
    bool mean = true;           // so far
    bool left_by_loss = false;  // which saw what forward left, and has the last word
  };
  void add_means();
  void settle_means();
  void compare(size_t index, const at::Tensor& now);
  std::set<size_t> silently_written() const;
  static bool is_same(const Entry& entry, const at::Tensor& now);
  Left left_of(const Entry& entry, const at::Tensor& now, at::Tensor copy) const;
  static bool stays_in_place(const Entry& entry);
  static void put_in_place(const Entry& entry);
  bool was_put_back(const Entry& entry) const;
  void put_all_in_place();
  static const at::Tensor& values_after(const Entry& entry);
  void restore(const std::vector<Entry*>& entries) const;
  static void restore_unseen(Entry& entry);
  [[noreturn]] static void refuse(const Entry& entry);

  std::vector<Entry> entries_;
  BitDifferences disagreements_;  // by place among the entries
  bool exact_;
  std::vector<Entry*> seen_;  // written by the micro-batch that is about to end
  bool sees_ = false;         // it has been looked at
  bool first_ = true;
  bool whole_ = false;
  bool second_pass_ = false;
};

}  // namespace infinitybatch
