#pragma once

#include "tape/tape.hpp"

#include <compare>
#include <functional>

namespace infinitybatch::tape {

/// A value that waits at a cut, as the segment left it that made it or changed it last.
struct Crossing {
  ValueId value = kNoValue;
  int32_t giver = -1;  ///< -1: a tensor that the model found and the tape writes
  auto operator<=>(const Crossing&) const = default;
};

/// What a segment needs of the ones before it.
struct Take {
  Crossing from;
  bool written = false;  ///< the segment changes its memory: start from a copy
  bool operator==(const Take&) const = default;
};

/// The ops between two cuts.
struct Segment {
  Range ops;
  uint32_t first_restore = 0;      ///< index into Tape::restores
  std::vector<Take> takes;         ///< its frontier
  std::vector<ValueId> gives;      ///< values that wait for later segments
  std::vector<ValueId> externals;  ///< tensors that it finds and nobody writes
  std::vector<ValueId> settled;    ///< what its first op would write: the stand-in gets the tensors
                                   ///< themselves
  bool reads_inputs = false;
  bool draws = false;  ///< random numbers
};

/// A place in front of an op.
struct Cut {
  uint32_t op = 0;
  bool stood_in = false;  ///< somebody stands in for the op (see `play`), and for what it writes
};

/// Cuts a tape. Outputs of the model are given by the last segment.
/// \param cuts in rising order
/// \throws Unsupported where a value and an alias of it wait at a cut and one is written later
std::vector<Segment> cut(const Tape& tape, const std::vector<Cut>& cuts);

/// Stands in for an op: gets its arguments, gives its result.
using StandIn = std::function<at::Tensor(std::vector<c10::IValue>& arguments)>;

/// Runs one segment.
/// \param values one for each of the tape's; those that the segment takes are set; afterwards those
///               that it gives, and the model's outputs, are
/// \param random states of generators to begin with; afterwards those that the segment left
/// \param first  in place of the segment's first op, where set
/// \param other_rows these rows are not those of the recording, or parameters have changed since
/// \throws OtherValues there, where user code could have taken another way
/// \throws StateError where a tensor that the recording read has been changed since
void play(const Tape& tape, const Segment& segment, const Batch& inputs,
          std::vector<at::Tensor>& values, std::vector<Draw>& random, const StandIn& first,
          bool other_rows = false);

/// The arguments of the segment's first op. `values` as for `play`.
std::vector<c10::IValue> first_arguments(const Tape& tape, const Segment& segment,
                                         const Batch& inputs, std::vector<at::Tensor>& values);

/// Takes one number from the generator, and returns the state of a new stream that begins with it.
GeneratorState fork(at::Generator generator);

/// What the model returned, from `values` after its last segment.
Batch result_of(const Tape& tape, const std::vector<at::Tensor>& values);

/// What differs first between two recordings of the same micro-batch, for people: other ops, or
/// other numbers in them. Nothing where they are the same program.
std::optional<std::string> difference(const Tape& a, const Tape& b);

}  // namespace infinitybatch::tape
