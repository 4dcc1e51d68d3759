#pragma once

#include <infinitybatch/execute/executor.hpp>
#include <infinitybatch/plan/planner.hpp>

namespace infinitybatch {

/// Runs the instructions of `piece` on the rows from `first_row` on, and measures what it asks for.
Measurement run(Executor& executor, const Piece& piece, int64_t first_row, at::Device device);

}  // namespace infinitybatch
