#pragma once

#include "execute/executor.hpp"
#include "plan/request.hpp"

#include <infinitybatch/core/errors.hpp>

#include <functional>

namespace infinitybatch {

/// A model ran another number of ops of the whole batch than the plan was made for.
class SegmentsChanged : public Error {
 public:
  explicit SegmentsChanged(int64_t segments)
      : Error("the plan is for another number of segments"), segments_(segments) {}
  int64_t segments() const noexcept { return segments_; }

 private:
  int64_t segments_;
};

/// Does one instruction of a plan on these rows.
using Perform = std::function<void(const Instruction&, Rows)>;

/// Runs the instructions of `piece` on the rows from `first_row` on, and measures what it asks for.
Measurement run(Executor& executor, const Piece& piece, int64_t first_row, at::Device device);
/// The same for a piece of the planner's, whose instructions are for a number of segments.
/// \throws SegmentsChanged where the tapes have another one
Measurement run_planned(Executor& executor, const Piece& piece, int64_t first_row,
                        at::Device device);
/// The same by `perform`. \param sinks where gradients go; null where there are none
Measurement run(const Perform& perform, autograd::GradientSinks* sinks, const Piece& piece,
                int64_t first_row, at::Device device);

}  // namespace infinitybatch
