#pragma once

#include "core/generator_state.hpp"
#include "core/shared_vector.hpp"
#include "tape/modes.hpp"
#include "tape/op_facts.hpp"

#include <infinitybatch/core/batch.hpp>

#include <ATen/core/Generator.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace infinitybatch::tape {

/// Number of a tensor on a tape. A tensor that ops change in place keeps its number.
using ValueId = uint32_t;
inline constexpr ValueId kNoValue = UINT32_MAX;
inline constexpr uint32_t kNoMemory = UINT32_MAX;
inline constexpr uint32_t kNoWitness = UINT32_MAX;

/// An argument of an op that is a tensor, or a list of them.
struct Slot {
  enum class Kind : uint8_t { tensor, list, optional_list };
  Kind kind = Kind::tensor;
  uint16_t argument = 0;  ///< position in the op's arguments
  uint32_t first = 0;     ///< tensor: its ValueId; lists: first index into Tape::elements
  uint32_t count = 0;     ///< lists: elements
  bool operator==(const Slot&) const = default;
};

/// A stretch of one of the tape's flat arrays.
struct Range {
  uint32_t begin = 0;
  uint32_t end = 0;
  bool operator==(const Range&) const = default;
};

/// A public ATen (or custom) operator with its arguments, or the restoring of memory that was
/// written outside of the dispatcher.
struct Op {
  const OpFacts* facts = nullptr;  ///< null for a restore
  uint32_t modes = 0;              ///< index into Tape::modes
  Range arguments;                 ///< of Tape::arguments; tensors are left out there
  Range slots;                     ///< of Tape::slots
  Range outputs;                   ///< of Tape::outputs
  Range draws;                     ///< of Tape::draws
  Range releases;                  ///< of Tape::releases: values whose last use this is
  bool reads_values = false;       ///< what follows may depend on values of its arguments: they
                                   ///< reach the host, or decide the shape of the result
  bool drew = false;               ///< it took numbers from a generator
  bool aside = false;              ///< scaled rows of a weight: replays find them scaled
  uint32_t witness = kNoWitness;   ///< index into Tape::witnesses; see `Recorder::witness`
  bool operator==(const Op&) const = default;
};

/// What an op showed user code of tensors' values while it was recorded.
struct Witness {
  std::vector<int64_t> sizes;        ///< of each result: how many dimensions, and each of them
  std::vector<c10::IValue> numbers;  ///< that it returned
  at::Tensor content;                ///< of memory that Python reads; undefined otherwise
};

/// What an op did to the device's memory while it was recorded; see `Recorder::lighten`.
struct OpCost {
  int64_t kept = 0;  ///< bytes: its results, and what its graph nodes save beside them
  int64_t rise = 0;  ///< bytes: the most that it held at once
  Range saves;       ///< of Costs::saves: arguments and results that its graph nodes keep
};

/// Of a light recording; see `Recorder::lighten`.
struct Costs {
  std::vector<OpCost> ops;  ///< for each op; empty where the recording was not a light one
  std::vector<ValueId> saves;
};

/// A tensor that the model found: parameter, buffer, constant, or a leaf of the inputs.
struct External {
  ValueId value = kNoValue;
  at::Tensor tensor;        ///< undefined for inputs, which the replay is given, and temporaries
  int64_t input_leaf = -1;  ///< index into the leaves of the inputs
  bool is_buffer = false;   ///< one of the model's: whoever replays gives it the same values
  std::optional<uint32_t> version;  ///< when it was first seen; nothing where it has no version
  at::Tensor before;  ///< its values before the tape's first write into it; undefined without one
};

/// State of a random generator in front of an op that draws.
struct Draw {
  at::Generator generator;
  GeneratorState state;
  bool passed = false;  ///< an argument of the op: put back as the replay found it
};

/// The linear program of ATen ops that one micro-batch ran, recorded as the user's code ran.
///
/// Replaying it gives the bits that the recording gave, with a graph of its own. Where that cannot
/// be promised `opaque` says why, and the user's code has to be run again instead; where even that
/// would not be exact, `refusal` says why.
struct Tape {
  SharedVector<Op> ops;
  size_t value_count = 0;
  /// For each value: a number of the memory that it lies in; values with the same one are aliases.
  SharedVector<uint32_t> memories;
  SharedVector<int64_t> memory_bytes;  ///< of each memory, when it was met
  SharedVector<External> externals;

  SharedVector<c10::IValue> arguments;
  SharedVector<Slot> slots;
  SharedVector<ValueId> elements;  ///< of list arguments; kNoValue for None
  SharedVector<ValueId> outputs;   ///< of ops, flat; kNoValue where nothing needs it
  std::vector<Draw> draws;
  SharedVector<ValueId> releases;
  SharedVector<Modes> modes;
  /// For ops without facts, in order: the bytes of all of the memory that the value lies in.
  std::vector<std::pair<ValueId, at::Tensor>> restores;

  std::vector<Witness> witnesses;  ///< of ops through which user code may see values

  SharedVector<uint32_t> origins;  ///< for each op: its position before `trim`
  Costs costs;

  bool scales_rows = false;   ///< of weights, that replays find scaled and do not scale
  bool strayed = false;       ///< something that is no op moved a generator: a seed
  bool seeds_own = false;     ///< the same of a generator of the user's own: ops hold its states
  bool whole_draws = false;   ///< ops that draw count as ops of the whole batch
  std::vector<Draw> initial;  ///< the default generators when the recording began; empty where
                              ///< nothing was drawn
  Batch result;               ///< what the model returned; tensors left out
  SharedVector<ValueId> result_values;  ///< for each leaf of `result`; kNoValue for objects

  std::optional<std::string> opaque;
  std::optional<std::string> refusal;
  /// The first op whose values reached the host: what follows may depend on them.
  std::optional<std::string> host_read;

  /// One line for each op, for people.
  std::string describe() const;
};

/// Drops ops that nothing needs and notes where each value is used for the last time.
/// \param may_go asked of ops that leave something in buffers alone which nothing else on the tape
///               reads: whether replays need not leave it there. Null: they do
void trim(Tape& tape, const std::function<bool(const Op&)>& may_go = nullptr);

/// The arrays that tapes of the same program may hold together.
auto shared_arrays(auto& tape) {
  return std::tie(tape.ops, tape.memories, tape.memory_bytes, tape.externals, tape.arguments,
                  tape.slots, tape.elements, tape.outputs, tape.releases, tape.modes, tape.origins,
                  tape.result_values);
}

/// Micro-batches run the same program, mostly: what is the same in the last tape that this thread
/// gave here, while that is there, they hold together.
void share_with_last(Tape& tape);

/// Runs the tape again, in the modes of the recording, and returns what the model returned then.
/// The random state of the default generators is as before afterwards.
/// \param inputs the same rows as in the recording; `requires_grad` as there
/// \throws StateError where a tensor that the recording read has been changed since
/// \throws Unsupported where the tape is opaque
Batch replay(const Tape& tape, const Batch& inputs);

}  // namespace infinitybatch::tape
