#include "tape/recorder.hpp"

#include "tape/program.hpp"

#include <ATen/autocast_mode.h>

#include <utility>

namespace infinitybatch::tape {
Recorder::Recorder(const Batch& inputs, const std::vector<at::Tensor>& buffers,
                   const std::vector<at::Device>& devices)
    : program_(std::allocate_shared<Program>(
          std::pmr::polymorphic_allocator<Program>(recycled_memory()), inputs, buffers, devices)) {}
Recorder::~Recorder() = default;

Recorder::Scope::Scope(Recorder& recorder) : program_(*recorder.program_) {
  outer_ = OpBus::listener<Program>();
  while (outer_ != nullptr && outer_->inner != nullptr) outer_ = outer_->inner;
  if (outer_ != nullptr) {
    outer_->inner = &program_;
  } else {
    listening_.emplace(program_, Hears{.results = true, .backward = true});
  }
  // Casts that autocast made before belong to another graph.
  if (Modes::current().in_autocast) at::autocast::clear_cache();
}

Recorder::Scope::~Scope() {
  listening_.reset();
  program_.stop();
  if (outer_ != nullptr) outer_->inner = nullptr;
}

void Recorder::rethrow() {
  program_->rethrow();
}

void Recorder::borrow(std::function<at::Tensor(const at::Tensor&)> found) {
  program_->lent = std::move(found);
}

void Recorder::leave_parameters(std::shared_ptr<const Storages> parameters) {
  program_->parameters = std::move(parameters);
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
