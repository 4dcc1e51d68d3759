#pragma once

#include "autograd/gradient_sinks.hpp"
#include "memory/trace.hpp"

#include <infinitybatch/execute/plan.hpp>

#include <algorithm>
#include <array>
#include <compare>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace infinitybatch {

/// What the allocator and the sinks saw while one micro-batch ran.
struct MicroBatchTrace {
  struct SinkMark {
    size_t event = 0;  ///< comes before this allocation event
    autograd::SinkEvent what;
    size_t operations = 0;   ///< had begun by then
    bool inherited = false;  ///< it was so in an earlier trace
    /// Whether the first gradient becomes the buffer.
    bool taken_over() const { return inherited || what.buffer == what.gradient; }
  };
  int64_t size = 0;    ///< samples
  int64_t length = 0;  ///< what the longest of them is computed at; 0 where all are alike
  std::vector<memory::AllocationEvent> events;
  std::vector<size_t> operation_starts;  ///< first event of each operation, in order
  std::vector<SinkMark> sinks;

  /// Takes over from an earlier trace which gradients became their buffers: later ones are added.
  void inherit(const MicroBatchTrace& earlier);
};

/// How much a micro-batch is: rows, computed at one length.
struct RowsAtLength {
  RowsAtLength(double how_many, int64_t how_long = 0)  // NOLINT(google-explicit-constructor)
      : rows(how_many), length(how_long) {}
  double rows;
  int64_t length;  ///< 0: the one that the profile was fit at
  auto operator<=>(const RowsAtLength&) const = default;
};

/// Bytes as a function of the micro-batch size.
struct AffineBytes {
  double fixed = 0;
  double per_sample = 0;
  double at(double samples) const { return fixed + per_sample * samples; }
};

/// What a micro-batch does at one point of its story.
struct Step {
  Step(Operation what, int64_t where = -1, bool later = false)  // NOLINT: one word
      : operation(what), segment(where), again(later) {}
  explicit Step(const Instruction& instruction)
      : operation(instruction.operation), segment(instruction.segment), back(instruction.back) {}
  Operation operation;
  int64_t segment;     ///< of a cut tape; -1 for the whole
  bool back = false;   ///< see `Instruction::back`
  bool again = false;  ///< another micro-batch has done it before: what there is once is there
  bool operator==(const Step&) const = default;
};

/// Whether the instruction is one of a micro-batch's story, or of a cut where all meet.
inline bool is_told(const Instruction& instruction) {
  return instruction.micro_batch >= 0 || instruction.segment >= 0;
}
/// The story of a plan with one micro-batch, or two.
std::vector<Step> steps_of(const Plan& plan);

/// One step of the memory story of a micro-batch of any size.
struct ProfileEvent {
  enum class Kind : uint8_t { allocate, free, gradient };
  static constexpr uint32_t kNoBlock = UINT32_MAX;  ///< of a gradient that took no memory
  Kind kind = Kind::allocate;
  uint32_t block = 0;        ///< index into MicroBatchProfile::blocks
  int64_t buffer_bytes = 0;  ///< gradient: what its buffer occupies from the first micro-batch on
  bool taken_over = false;   ///< gradient: the first one becomes the buffer
  bool again = false;        ///< gradient: an earlier one of the same story made the buffer
};

/// The memory story of one micro-batch as a function of its size. The peak is a maximum of affine
/// functions, so a line through two measured peaks would be too low; here every single block is an
/// affine function and the story is told again at the size asked for.
///
/// Of samples that differ in length a block is that function at the length of the two traces, times
/// what further traces, of any size, show at other lengths. A block is a tensor, whose bytes are a
/// product of dimensions: each is a number, the rows, or grows with the length, at most two of
/// these (attention's square). So three lengths tell all others, by the parabola through them.
/// Where fewer are known what it gives is a bound, as long as nothing falls with the length.
class MicroBatchProfile {
 public:
  /// Fits the story to traces of two different sizes, neither of them 1 (one sample takes other
  /// kernels). Empty where the two tell different stories (routing that depends on the data).
  /// \param steps what the micro-batch did, in order, one for each of `operation_starts`; what it
  ///              does while streaming, if left out
  static std::optional<MicroBatchProfile> fit(const MicroBatchTrace& a, const MicroBatchTrace& b,
                                              const std::vector<Step>& steps, int64_t rounding = 1);
  static std::optional<MicroBatchProfile> fit(const MicroBatchTrace& a, const MicroBatchTrace& b);

  /// Says how long the samples of the two traces were, where other ones turn out to be longer or
  /// shorter.
  void tell_length(int64_t length);
  /// Takes a trace at another length, of any number of samples. False where it tells another story
  /// than the two that the profile was fit to.
  bool learn(const MicroBatchTrace& trace);
  /// Of the two traces; 0 where all samples are alike.
  int64_t length() const noexcept { return length_; }
  /// All that are known, rising.
  std::vector<int64_t> lengths() const;

  /// What one operation does to live memory.
  struct Effect {
    int64_t rise = 0;  ///< highest point, above where it began
    int64_t net = 0;   ///< where it ends, relative to where it began
  };
  /// \param step  of a micro-batch that is not the first is that of the first where the profile
  ///              was not told of two
  /// \param first whether this is the first micro-batch, whose gradients become the buffers
  Effect effect(Step step, RowsAtLength micro_batch, bool first) const;
  /// Of all blocks that the step allocates the largest one.
  int64_t largest_block(Step step, RowsAtLength micro_batch) const;
  /// Of all blocks that are left when the micro-batch is over, but for gradients, the largest one.
  int64_t largest_left(RowsAtLength micro_batch) const;

  /// How many micro-batches the traces were of.
  int micro_batches() const noexcept {
    const auto again = [](const Step& step) { return step.again; };
    return std::any_of(steps_.begin(), steps_.end(), again) ? 2 : 1;
  }

  /// Bytes of all gradient buffers.
  int64_t buffer_bytes() const noexcept { return buffer_bytes_; }

 private:
  /// Bytes of each block at another length ÷ those at `length_`.
  struct Known {
    int64_t length = 0;
    std::vector<double> ratios;
  };
  /// What the ratios of known lengths count for at another one.
  struct Share {
    const Known* known;
    double weight;
  };
  std::vector<Share> shares_at(int64_t length) const;
  double bytes_of(uint32_t block, double rows, const std::vector<Share>& shares) const;
  /// The step's events, the last excluded; none where it is no step of the story.
  std::pair<size_t, size_t> events_of(Step step) const;

  std::vector<AffineBytes> blocks_;
  int64_t length_ = 0;
  std::vector<Known> known_;  // rising; empty where all samples are alike
  std::vector<ProfileEvent> events_;
  std::vector<Step> steps_;
  std::vector<size_t> operation_starts_;
  int64_t buffer_bytes_ = 0;
};

}  // namespace infinitybatch
