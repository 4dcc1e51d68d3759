#include <infinitybatch/tape/recorder.hpp>

#include "program.hpp"

#include <infinitybatch/core/errors.hpp>

namespace infinitybatch::tape {
namespace {

thread_local Program* innermost = nullptr;

std::unique_ptr<at::ObserverContext> on_op(const at::RecordFunction& op) {
  if (innermost != nullptr) innermost->begin(op);
  return nullptr;
}

void after_op(const at::RecordFunction& op, at::ObserverContext* /*context*/) {
  if (innermost != nullptr) innermost->end(op);
}

}  // namespace

Recorder::Recorder(const Batch& inputs, const std::vector<at::Tensor>& buffers,
                   const std::vector<at::Device>& devices)
    : program_(std::make_unique<Program>(inputs, buffers, devices)) {}
Recorder::~Recorder() = default;

Recorder::Scope::Scope(Recorder& recorder)
    : outer_(innermost),
      handle_(at::addThreadLocalCallback(
          at::RecordFunctionCallback(&on_op, &after_op)
              .needsInputs(true)
              .needsOutputs(true)
              .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}))) {
  // The outer recording does not see what the inner one sees.
  if (outer_ != nullptr) outer_->give_up("another recording runs inside");
  innermost = recorder.program_.get();
}

Recorder::Scope::~Scope() {
  at::removeCallback(handle_);
  innermost = outer_;
}

Tape Recorder::finish(const Batch& outputs) {
  return program_->finish(outputs);
}

}  // namespace infinitybatch::tape
