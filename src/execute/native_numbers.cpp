#include "execute/native_numbers.hpp"

#include "tape/segment.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Context.h>

namespace infinitybatch {

NativeNumbers::NativeNumbers(bool wanted, const std::vector<at::Device>& devices)
    : devices_(devices) {
  if (!wanted) return;
  streams_ = std::make_shared<coupled::RandomStreams>(devices);
  foreign_ = RngSnapshot::capture_foreign();
  foreign_before_ = tell_foreign_sources();
}

void NativeNumbers::rewind() const {
  if (!streams_) return;
  streams_->rewind();
  foreign_->restore();
}

void NativeNumbers::meet(const tape::Tape& tape) {
  if (!streams_) return;
  streams_->meet(tape);
  const auto now = tell_foreign_sources();
  if (!foreign_after_) foreign_after_ = now;
  for (const auto& [name, state] : now) {
    if (foreign_after_->at(name) == state) continue;
    throw CouplingError(
        name, "forward draws from the module " + name +
                  ", and not equally often for each micro-batch, so match_native_rng does not know "
                  "the numbers of the whole batch; draw as often for any number of samples, or by "
                  "torch.rand");
  }
}

void NativeNumbers::shift() const {
  if (!streams_) return;
  for (const at::Device& device : devices_) {
    tape::fork(at::globalContext().defaultGenerator(device));
  }
}

bool NativeNumbers::drawn(const coupled::CouplingWatch& watch) const {
  return streams_ && (watch.drew() || foreign_moved());
}

bool NativeNumbers::foreign_moved() const {
  return streams_ && tell_foreign_sources() != foreign_before_;
}

}  // namespace infinitybatch
