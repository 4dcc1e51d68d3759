#pragma once

#include "core/generator_state.hpp"
#include "tape/tape.hpp"

#include <ATen/core/Generator.h>

#include <functional>
#include <optional>
#include <vector>

namespace infinitybatch::coupled {

/// Where random generators stand in the whole batch's own run, while its micro-batches go from draw
/// to draw together: op by op, each for all samples. Nothing but `rewind` and `settle` changes a
/// generator itself.
class RandomStreams {
 public:
  /// The default generators' states of this moment are the beginning.
  /// \param devices whose default generators there are, beside the CPU's
  explicit RandomStreams(const std::vector<at::Device>& devices);

  /// Takes in the generators of the user's own that `tape` draws from.
  /// \throws CouplingError where they stand elsewhere than in front of the micro-batches before
  void meet(const tape::Tape& tape);
  /// Puts the user's own generators where the step found them.
  void rewind() const;
  /// Puts all generators where the whole batch's run has them.
  void settle() const;
  /// Whether the default generators still stand where they stood in the beginning.
  bool untouched() const;
  /// Somebody has drawn for the whole batch since `settle`.
  void take();

  /// The stream that an op draws from: the default generators, or one that it is given.
  using Which = int64_t;
  static constexpr Which kDefault = -1;
  Which which(const std::optional<at::Generator>& given) const;

  using Position = std::vector<GeneratorState>;
  const Position& position(Which which) const;
  void move(Which which, Position to);

  /// Runs `draw` from a position and returns where it leaves off; generators are put back.
  /// \param given the generator to use in place of the first micro-batch's, which may be another
  ///              object
  Position draw(Which which, const std::optional<at::Generator>& given, const Position& from,
                const std::function<void()>& draw) const;

 private:
  struct Stream {
    std::vector<at::Generator> generators;
    Position begin;
    Position now;
  };
  Stream& stream(Which which) { return which < 0 ? default_ : own_[static_cast<size_t>(which)]; }
  const Stream& stream(Which which) const {
    return which < 0 ? default_ : own_[static_cast<size_t>(which)];
  }

  Stream default_;
  std::vector<Stream> own_;
};

}  // namespace infinitybatch::coupled
