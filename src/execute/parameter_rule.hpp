#pragma once

#include "core/check.hpp"
#include "coupled/watched_memory.hpp"

#include <infinitybatch/core/model.hpp>

#include <vector>

namespace infinitybatch {

/// What BufferRule does for buffers, for parameters that forward changes: weights that are clamped
/// or normed in forward, momentum encoders, initialisation from the first batch (ActNorm). Every
/// micro-batch starts from the parameters that the step began with; what all of them leave equal is
/// written once, where they differ it is a typed error.
///
/// Copies only what is written into; a parameter that was given other memory (`.data = …`) gets its
/// own back.
class ParameterRule final : public Check {
 public:
  /// \param memory knows the parameters, sees writes into them, and outlives the rule
  /// \param exact without it the parameters of one micro-batch carry on into the next
  ParameterRule(const std::vector<NamedParameter>& parameters, coupled::WatchedMemory& memory,
                bool exact);

  /// \throws Unsupported where a parameter was changed by what is no operator, so that the values
  /// that it had are lost
  void see_micro_batch() override;
  void end_micro_batch() override;
  /// The same for a forward that nobody wants but for its outputs: what it leaves is undone.
  void end_trial();
  void begin_second_pass() noexcept override { second_pass_ = true; }
  /// Whether any micro-batch has changed one.
  bool written() const noexcept { return written_; }
  void commit() override;
  /// One that forward has written, as the step found it: in this memory, with these values;
  /// undefined where it was given other memory alone.
  struct Found {
    at::Tensor parameter, memory, values;
  };
  std::vector<Found> found() const;
  /// Every parameter lies again in the memory that the step found it in, with its values.
  void roll_back() override;
  void let_go() override {
    entries_.clear();
    seen_.clear();
  }

 private:
  struct Entry {
    NamedParameter parameter;
    size_t place = 0;  // in memory_
    uint32_t version = 0;
    bool written = false;
    bool exchanged = false;  // it was given other memory
    at::Tensor left;         // what the first micro-batch left; undefined before
    at::Tensor disagree;     // 0-dimensional bool on its device
  };
  bool is_exchanged(const Entry& entry) const;
  at::Tensor values_before(const Entry& entry) const;
  void restore(Entry& entry);

  std::vector<Entry> entries_;
  coupled::WatchedMemory& memory_;
  std::vector<Entry*> seen_;  // written by the micro-batch that is about to end
  bool sees_ = false;         // it has been looked at
  bool exact_;
  bool first_ = true;
  bool second_pass_ = false;
  bool written_ = false;
};

}  // namespace infinitybatch
