#pragma once

#include <infinitybatch/execute/executor.hpp>
#include <infinitybatch/plan/planner.hpp>

#include <functional>

namespace infinitybatch {

/// Does one instruction of a plan on these rows.
using Perform = std::function<void(const Instruction&, Rows)>;

/// Runs the instructions of `piece` on the rows from `first_row` on, and measures what it asks for.
Measurement run(Executor& executor, const Piece& piece, int64_t first_row, at::Device device);
/// The same by `perform`. \param sinks where gradients go; null where there are none
Measurement run(const Perform& perform, autograd::GradientSinks* sinks, const Piece& piece,
                int64_t first_row, at::Device device);

}  // namespace infinitybatch
