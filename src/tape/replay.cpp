#include "tape/draws.hpp"
#include "tape/player.hpp"
#include "tape/segment.hpp"

#include <infinitybatch/core/errors.hpp>

#include <algorithm>

namespace infinitybatch::tape {
namespace {

/// Tensors that the segment finds; those that the tape writes come with its frontier.
void bind_externals(const Tape& tape, const Segment& segment, const Batch& inputs, Player& player) {
  for (const External& external : tape.externals) {
    const auto& wanted = segment.externals;
    if (std::binary_search(wanted.begin(), wanted.end(), external.value)) {
      player.bind(external, inputs);
    }
    const auto& settled = segment.settled;
    if (std::find(settled.begin(), settled.end(), external.value) != settled.end()) {
      player.lend(external);
    }
  }
}

}  // namespace

void play(const Tape& tape, const Segment& segment, const Batch& inputs,
          std::vector<at::Tensor>& values, std::vector<Draw>& random, const StandIn& first,
          bool other_rows) {
  const ModesGuard modes;
  const GeneratorsGuard generators(tape);
  Player player(tape, values, segment.first_restore);
  if (other_rows) player.check_witnesses();
  bind_externals(tape, segment, inputs, player);
  if (segment.draws) set_states(random);
  player.play(segment.ops, first);
  if (!segment.draws) return;
  for (Draw& draw : random) draw.state = GeneratorState(draw.generator);
}

std::vector<c10::IValue> first_arguments(const Tape& tape, const Segment& segment,
                                         const Batch& inputs, std::vector<at::Tensor>& values) {
  Player player(tape, values, segment.first_restore);
  bind_externals(tape, segment, inputs, player);
  return player.arguments(tape.ops[segment.ops.begin]);
}

Batch result_of(const Tape& tape, const std::vector<at::Tensor>& values) {
  std::vector<Leaf> leaves = tape.result.leaves();
  for (size_t i = 0; i < leaves.size(); ++i) {
    if (tape.result_values[i] != kNoValue) leaves[i].tensor = values[tape.result_values[i]];
  }
  return {std::move(leaves), tape.result.structure()};
}

Batch replay(const Tape& tape, const Batch& inputs) {
  if (tape.opaque) {
    throw Unsupported("this forward cannot be replayed from its tape: " + *tape.opaque +
                      "; run it again");
  }
  const ModesGuard modes;
  const GeneratorsGuard generators(tape);
  std::vector<at::Tensor> values(tape.value_count);
  Player player(tape, values, /*restored=*/0);
  for (const External& external : tape.externals) player.bind(external, inputs);
  set_states(tape.initial);
  player.play({0, static_cast<uint32_t>(tape.ops.size())}, /*first=*/nullptr);
  return result_of(tape, values);
}

}  // namespace infinitybatch::tape
