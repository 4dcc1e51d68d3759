#pragma once

namespace infinitybatch {

/// Who finds out that micro-batches are not what the whole batch would have been, or that a step
/// cannot be undone. All of them live through the same moments of a step, in this order.
class Check {
 public:
  Check() = default;
  virtual ~Check() = default;
  Check(const Check&) = delete;
  Check& operator=(const Check&) = delete;

  /// A micro-batch is done, and its graph is gone: what it has left is looked at, by all checks
  /// before any of them puts something back, for buffers and parameters may lie in one memory.
  virtual void see_micro_batch() {}
  /// And then it is put back. Sees it first where that has not been done.
  virtual void end_micro_batch() {}
  /// From now on micro-batches run for the second time: what they leave is undone.
  virtual void begin_second_pass() {}
  /// All micro-batches have been there: looks at what needs more than watching them. What it finds
  /// is thrown by `rethrow`.
  virtual void look() {}
  /// Writes what all micro-batches have left alike. \throws CouplingError naming what is not
  virtual void commit() {}
  /// \throws what `look` has found, where nobody had more to say
  virtual void rethrow() const {}
  /// Instead: all as the step found it.
  virtual void roll_back() {}
  /// Nothing will be undone any more: what that would have taken is let go of.
  virtual void let_go() {}
};

}  // namespace infinitybatch
