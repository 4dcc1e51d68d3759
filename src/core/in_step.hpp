#pragma once

namespace infinitybatch {

/// While it lives a step runs, a call of a wrapped model, or its backward: whatever wrapped model
/// is called by their code (a part of the model, the loss, a checkpoint that computes again)
/// computes plainly. So it is in the threads too in which autograd goes back on an accelerator.
class InStep {
 public:
  InStep();
  ~InStep();
  InStep(const InStep&) = delete;
  InStep& operator=(const InStep&) = delete;

  static bool is();

 private:
  bool outermost_;
};

}  // namespace infinitybatch
