#include <infinitybatch/coupled/whole_batch_op.hpp>

#include "across_batch_op.hpp"
#include "batch_norm.hpp"
#include "embedding.hpp"

#include <algorithm>
#include <array>

namespace infinitybatch::coupled {
namespace {

/// An operator that may see the whole batch.
struct Known {
  std::string_view name;
  int flag;          ///< the bool argument that must be set for it; -1: it always does
  bool provisional;  ///< its result depends on the rest of the batch
  std::unique_ptr<WholeBatchOp> (*make)(const tape::Tape& tape, const tape::Op& op);
};

constexpr std::array kKnown{
    Known{"aten::batch_norm", /*flag=*/5, /*provisional=*/true,
          [](const tape::Tape&, const tape::Op&) -> std::unique_ptr<WholeBatchOp> {
            return std::make_unique<BatchNorm>();
          }},
    Known{"aten::embedding", /*flag=*/3, /*provisional=*/false,
          [](const tape::Tape&, const tape::Op&) -> std::unique_ptr<WholeBatchOp> {
            return std::make_unique<ScaledEmbedding>();
          }},
    Known{"infinitybatch::across_batch", /*flag=*/-1, /*provisional=*/true,
          [](const tape::Tape& tape, const tape::Op& op) -> std::unique_ptr<WholeBatchOp> {
            return std::make_unique<AcrossBatch>(tape.arguments[op.arguments.begin + 1].toInt());
          }},
};

const Known* known(const tape::Tape& tape, const tape::Op& op) {
  if (op.facts == nullptr) return nullptr;
  for (const Known& candidate : kKnown) {
    if (op.facts->name() != candidate.name) continue;
    if (candidate.flag < 0) return &candidate;
    const auto flag = op.arguments.begin + static_cast<uint32_t>(candidate.flag);
    if (flag >= op.arguments.end) continue;
    const c10::IValue& value = tape.arguments[flag];
    if (value.isBool() && value.toBool()) return &candidate;
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

bool is_whole_batch_op(const tape::Tape& tape, const tape::Op& op) {
  return known(tape, op) != nullptr;
}

bool is_provisional(const tape::Tape& tape, const tape::Op& op) {
  const Known* found = known(tape, op);
  return found != nullptr && found->provisional;
}

std::vector<uint32_t> whole_batch_ops(const tape::Tape& tape) {
  std::vector<uint32_t> positions;
  for (uint32_t i = 0; i < tape.ops.size(); ++i) {
    if (is_whole_batch_op(tape, tape.ops[i])) positions.push_back(i);
  }
  return positions;
}

std::unique_ptr<WholeBatchOp> stand_in(const tape::Tape& tape, const tape::Op& op) {
  return known(tape, op)->make(tape, op);
}

}  // namespace infinitybatch::coupled
