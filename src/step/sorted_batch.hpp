#pragma once

#include "execute/setup.hpp"
#include "execute/trimming.hpp"
#include "plan/request.hpp"
#include "step/sequence_inputs.hpp"

#include <infinitybatch/core/batch_source.hpp>
#include <infinitybatch/step/options.hpp>
#include <infinitybatch/step/virtual_batch.hpp>

#include <exception>
#include <memory>

namespace infinitybatch {

/// How the rows of a batch are sorted, trimmed and packed into micro-batches, as the options say.
/// \param targets without tensors where there are none
/// \param known   what earlier batches have told of these inputs, and learns from this one
/// \throws BatchError naming an argument that is not found, is no mask, or may belong to several
///         sequences
std::shared_ptr<Trimming> trimming_of(const Options& options, const Batch& inputs,
                                      const Batch& targets, SequenceInputs& known);

/// Whether a leaf of the inputs, or targets, marks padding.
bool tells_lengths(const Options& options, const Batch& batch, size_t leaf, bool targets);

/// How many of the rows from `begin` on, which are sorted by length, make a micro-batch: as many as
/// have at most `tokens` positions at the length of the longest of them, and at most `most` rows. A
/// row that is longer stands alone.
int64_t packed_from(int64_t begin, const std::vector<Trimming::Sequence>& sequences,
                    std::optional<int64_t> tokens, std::optional<int64_t> most);
/// So all rows.
std::vector<int64_t> packed(const std::vector<Trimming::Sequence>& sequences,
                            std::optional<int64_t> tokens, std::optional<int64_t> most);

/// Asks for a plan by the lengths of these rows, where micro-batches are planned.
void plan_by_length(Request& request, const Trimming& trimming);

/// Throws what samples that forward combines have thrown; where rows are sorted, it says that no
/// budget makes them one micro-batch.
[[noreturn]] void refuse_coupled(const std::exception_ptr& error, const Problem& problem);

/// One step of a VirtualBatch on sorted rows: what the engine is given in place of what the caller
/// has given.
class SortedStep {
 public:
  /// \param reads_parts whether sources are read as micro-batches ask for rows, and not as a whole:
  ///                     what that does to memory differs from one micro-batch to the next
  /// \param known what earlier batches have told of their inputs
  /// \throws InvalidArgument where inputs require grad
  SortedStep(const Options& options, const Loss& loss, const BatchSource& inputs,
             const BatchSource& targets, bool reads_parts, SequenceInputs& known);
  SortedStep(const SortedStep&) = delete;
  SortedStep& operator=(const SortedStep&) = delete;

  const std::shared_ptr<Trimming>& trimming() const noexcept { return trimming_; }
  const BatchSource& inputs() const noexcept { return inputs_; }
  const BatchSource& targets() const noexcept { return targets_; }
  /// Sees the caller's order, and that nothing is taken from padding.
  const Loss& loss() const noexcept { return loss_; }
  /// Says which samples it is shown.
  std::function<void(const MicroBatch&)> callback(
      const std::function<void(const MicroBatch&)>& given) const;
  /// \throws BatchError where a loss counts targets that were cut off
  void check_denominator() const;

 private:
  std::shared_ptr<Trimming> trimming_;
  BatchSource inputs_;
  BatchSource targets_;
  Loss loss_;
};

/// That also where the loss is the caller's of a Wrap.
std::function<void(const MicroBatch&)> showing_samples(
    const std::shared_ptr<const Trimming>& trimming,
    const std::function<void(const MicroBatch&)>& given);

/// Finds out along which dimensions outputs are trimmed with their inputs, and which inputs that
/// are as long as a sequence need be trimmed with it; and compares a few rows, trimmed, with the
/// same rows in full: in steps 1, 2, 4, 8, … of each kind of batch. Runs forward on each alone and
/// undoes that.
/// \throws BatchError where they differ by more than rounding
void learn_trimming(const Setup& setup);

}  // namespace infinitybatch
