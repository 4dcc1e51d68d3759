#include "coupled/whole_batch_op.hpp"

#include "coupled/across_batch_op.hpp"
#include "coupled/batch_norm.hpp"
#include "coupled/embedding.hpp"
#include "tape/arguments.hpp"

#include <infinitybatch/core/errors.hpp>

#include <algorithm>
#include <array>

namespace infinitybatch::coupled {
namespace {

/// An argument that the model found: a parameter, a buffer, a constant. Undefined where it has none
/// or made it.
at::Tensor found(const tape::Tape& tape, const tape::Op& op, uint16_t argument) {
  for (uint32_t s = op.slots.begin; s < op.slots.end; ++s) {
    const tape::Slot& slot = tape.slots[s];
    if (slot.argument != argument || slot.kind != tape::Slot::Kind::tensor) continue;
    for (const tape::External& external : tape.externals) {
      if (external.value == slot.first && external.input_leaf < 0) return external.tensor;
    }
  }
  return {};
}

/// An operator that may see the whole batch.
struct Known {
  std::string_view name;
  int flag;          ///< the bool argument that must be set for it; -1: it always does
  bool provisional;  ///< its result depends on the rest of the batch
  std::unique_ptr<WholeBatchOp> (*make)(const tape::Tape& tape, const tape::Op& op);
};

constexpr std::array kKnown{
    Known{"aten::batch_norm", /*flag=*/5, /*provisional=*/true,
          [](const tape::Tape& tape, const tape::Op& op) -> std::unique_ptr<WholeBatchOp> {
            constexpr uint16_t kWeight = 1, kMean = 3;
            return std::make_unique<BatchNorm>(found(tape, op, kWeight).defined() ||
                                               found(tape, op, kMean).defined());
          }},
    Known{"aten::embedding", /*flag=*/3, /*provisional=*/false,
          [](const tape::Tape&, const tape::Op&) -> std::unique_ptr<WholeBatchOp> {
            return std::make_unique<ScaledEmbedding>();
          }},
    Known{"aten::embedding_bag", /*flag=*/3, /*provisional=*/false,
          [](const tape::Tape& tape, const tape::Op& op) -> std::unique_ptr<WholeBatchOp> {
            for (uint32_t o = op.outputs.begin + 1; o < op.outputs.end; ++o) {
              if (tape.outputs[o] == tape::kNoValue) continue;
              throw CouplingError(
                  "aten::embedding_bag",
                  "aten::embedding_bag couples the samples of a batch (scale_grad_by_freq), and "
                  "forward uses more of its results than the sums; call "
                  "torch.nn.functional.embedding_bag");
            }
            return std::make_unique<ScaledEmbeddingBag>();
          }},
    Known{"infinitybatch::across_batch", /*flag=*/-1, /*provisional=*/true,
          [](const tape::Tape& tape, const tape::Op& op) -> std::unique_ptr<WholeBatchOp> {
            return std::make_unique<AcrossBatch>(tape.arguments[op.arguments.begin + 1].toInt());
          }},
};

/// Whether the op's first argument is a parameter, or lies in its memory, and no op of the tape
/// writes there. Not known while a tape is being recorded.
bool given_a_parameter(const tape::Tape& tape, const tape::Op& op) {
  bool found = false;
  tape::for_each_argument(tape, op, [&](tape::ValueId value, const tape::Slot& slot) {
    if (slot.argument != 0 || value >= tape.memories.size()) return;
    if (tape.memories[value] == tape::kNoMemory) return;
    for (const tape::External& external : tape.externals) {
      found = found ||
              (external.input_leaf < 0 && !external.is_buffer && external.tensor.defined() &&
               !external.before.defined() && tape.memories[external.value] == tape.memories[value]);
    }
  });
  return found;
}

const Known* known(const tape::Tape& tape, const tape::Op& op) {
  if (op.facts == nullptr) return nullptr;
  for (const Known& candidate : kKnown) {
    if (op.facts->name() != candidate.name) continue;
    if (candidate.flag < 0) return &candidate;
    const auto flag = op.arguments.begin + static_cast<uint32_t>(candidate.flag);
    if (flag >= op.arguments.end) continue;
    const c10::IValue& value = tape.arguments[flag];
    if (!value.isBool() || !value.toBool()) continue;
    // BatchNorm of weights (weight standardisation) mixes no samples.
    const bool of_weights = candidate.name == "aten::batch_norm" && given_a_parameter(tape, op);
    if (!of_weights) return &candidate;
  }
  return nullptr;
}

}  // namespace

at::Tensor SettledBuffers::current(const at::Tensor& buffer) const {
  for (const Entry& entry : entries_) {
    if (entry.buffer.is_same(buffer)) return entry.value;
  }
  return buffer.detach();
}

void SettledBuffers::settle(const at::Tensor& buffer, at::Tensor value) {
  for (Entry& entry : entries_) {
    if (!entry.buffer.is_same(buffer)) continue;
    entry.value = std::move(value);
    return;
  }
  entries_.push_back({buffer, std::move(value)});
}

bool has_stand_in(std::string_view name) {
  return std::any_of(kKnown.begin(), kKnown.end(),
                     [&](const Known& candidate) { return candidate.name == name; });
}

bool draws_for_all(const tape::Tape& tape, const tape::Op& op) {
  return tape.whole_draws && op.drew;
}

bool is_whole_batch_op(const tape::Tape& tape, const tape::Op& op) {
  return known(tape, op) != nullptr || draws_for_all(tape, op);
}

bool is_provisional(const tape::Tape& tape, const tape::Op& op) {
  const Known* found = known(tape, op);
  if (draws_for_all(tape, op)) return true;
  return found != nullptr && found->provisional;
}

std::vector<uint32_t> whole_batch_ops(const tape::Tape& tape) {
  std::vector<uint32_t> positions;
  for (uint32_t i = 0; i < tape.ops.size(); ++i) {
    if (is_whole_batch_op(tape, tape.ops[i])) positions.push_back(i);
  }
  return positions;
}

bool same_layer(const tape::Tape& a, const tape::Op& x, const tape::Tape& b, const tape::Op& y) {
  if (x.facts != y.facts) return false;
  const bool numbers = x.facts->name() != "infinitybatch::across_batch";  // its one is a name
  const uint32_t count = x.arguments.end - x.arguments.begin;
  for (uint32_t i = 0; i < count; ++i) {
    const c10::IValue& left = a.arguments[x.arguments.begin + i];
    const c10::IValue& right = b.arguments[y.arguments.begin + i];
    const bool plain = left.isDouble() || left.isBool() || left.isInt();
    if (numbers && plain && !(left == right)) return false;
    const auto argument = static_cast<uint16_t>(i);
    if (!found(a, x, argument).is_same(found(b, y, argument))) return false;
  }
  return true;
}

std::unique_ptr<WholeBatchOp> stand_in(const tape::Tape& tape, const tape::Op& op) {
  return known(tape, op)->make(tape, op);
}

}  // namespace infinitybatch::coupled
