#include <infinitybatch/tape/recorder.hpp>

#include "program.hpp"

#include <ATen/autocast_mode.h>

#include <utility>

namespace infinitybatch::tape {
namespace {

thread_local Program* innermost = nullptr;

std::unique_ptr<at::ObserverContext> on_op(const at::RecordFunction& op) {
  for (Program* program = innermost; program != nullptr; program = program->outer) {
    program->begin(op);
  }
  return nullptr;
}

void after_op(const at::RecordFunction& op, at::ObserverContext* /*context*/) {
  for (Program* program = innermost; program != nullptr; program = program->outer) {
    program->end(op);
  }
}

}  // namespace

Recorder::Recorder(const Batch& inputs, const std::vector<at::Tensor>& buffers,
                   const std::vector<at::Device>& devices)
    : program_(std::allocate_shared<Program>(
          std::pmr::polymorphic_allocator<Program>(recycled_memory()), inputs, buffers, devices)) {}
Recorder::~Recorder() = default;

Recorder::Scope::Scope(Recorder& recorder) : outer_(innermost) {
  recorder.program_->outer = outer_;
  innermost = recorder.program_.get();
  if (outer_ == nullptr) {
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(&on_op, &after_op)
            .needsInputs(true)
            .needsOutputs(true)
            .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
  }
  // Casts that autocast made before belong to another graph.
  if (Modes::current().in_autocast) at::autocast::clear_cache();
}

Recorder::Scope::~Scope() {
  if (handle_) at::removeCallback(*handle_);
  innermost->stop();
  innermost = outer_;
}

void Recorder::rethrow() {
  program_->rethrow();
}

void Recorder::disturb(std::function<bool(const Tape&, const Op&)> which) {
  program_->disturb = std::move(which);
}

void Recorder::witness() {
  program_->witnesses = true;
}

void Recorder::lighten(at::Device device) {
  program_->light = device;
}

void Recorder::keep(FrontierGuide guide, bool tail,
                    std::function<void(const Frontiers&, int32_t cut)> reached) {
  program_->guide = std::move(guide);
  program_->keeps_tail = tail;
  program_->reached = std::move(reached);
}

Frontiers Recorder::take_frontiers() {
  return std::move(program_->frontiers);
}

Tape Recorder::finish(const Batch& outputs, bool trimmed) {
  Tape tape = program_->finish(outputs);
  if (trimmed && !tape.opaque) trim(tape);
  return tape;
}

}  // namespace infinitybatch::tape
