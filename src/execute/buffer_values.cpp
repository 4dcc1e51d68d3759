#include "execute/buffer_values.hpp"

#include "core/bits.hpp"

#include <c10/core/GradMode.h>

namespace infinitybatch {

BufferValues::BufferValues(const std::vector<BufferSlot>& slots) {
  const at::NoGradGuard no_grad;
  for (const BufferSlot& slot : slots) {
    const at::Tensor tensor = slot.get();
    if (tensor.defined()) entries_.push_back({slot, tensor, tensor.detach().clone()});
  }
}

void BufferValues::restore() const {
  const at::NoGradGuard no_grad;
  for (const Entry& entry : entries_) {
    if (!entry.slot.get().is_same(entry.tensor)) entry.slot.set(entry.tensor);
    resize_to(entry.tensor, entry.values);
    entry.tensor.variable_data().copy_(entry.values);
  }
}

}  // namespace infinitybatch
