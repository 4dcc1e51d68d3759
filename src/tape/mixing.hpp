#pragma once

#include "core/exchange.hpp"
#include "tape/tape.hpp"

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace infinitybatch::tape {

/// Where a tape mixes samples.
struct Mixing {
  std::string op;     ///< the first op whose result depends on several samples; "forward" where it
                      ///< was not found
  size_t output = 0;  ///< the leaf of the result that it reaches
};

/// Gives an op's result in its place, where it does not run on one micro-batch alone: false where
/// it does.
/// \param order rows that stand for the micro-batch's own; null where they are its own
using SettledOp = std::function<bool(uint32_t op, std::vector<c10::IValue>& stack,
                                     const std::vector<int64_t>* order)>;

/// Plays the tape again, without a graph, on rows that are exchanged as `exchanges` says and on
/// those of the recording, which come first, and looks for outputs that mix samples. The random
/// numbers are the recording's; tensors that it wrote into are copies.
///
/// Nothing where nobody can tell: where sizes depend on values that are exchanged, or where the
/// random numbers of one sample depend on how many another one took.
/// \param inputs   of the recording
/// \param compared for each leaf of the result, whether it matters. Of these, leaves are compared
///                 that have a dimension as long as there are rows, or several dimensions the
///                 first of which is a multiple of it (samples and positions in one)
/// \param settled  for ops that see the whole batch; may be empty
/// \throws whatever an op throws: the tape does not fit other values
std::optional<Mixing> find_mixing(const Tape& tape, const Batch& inputs, const Exchanges& exchanges,
                                  const std::vector<bool>& compared, const SettledOp& settled);

}  // namespace infinitybatch::tape
