#include "core/pinned_copies.hpp"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace infinitybatch {
namespace {

struct Pending {
  c10::Stream stream;
  c10::Event event;
};

/// Of each stream the last copy: a stream works in order.
std::vector<Pending>& pending() {
  static thread_local std::vector<Pending> copies;
  return copies;
}

}  // namespace

PinnedCopies::~PinnedCopies() {
  try {
    wait();
  } catch (...) {
    // A device that fails says so again at its next op, where it can be raised.
    pending().clear();
  }
}

void PinnedCopies::started(c10::Device device) {
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  std::vector<Pending>& copies = pending();
  auto found = std::find_if(copies.begin(), copies.end(),
                            [&](const Pending& copy) { return copy.stream == stream; });
  if (found == copies.end()) {
    copies.push_back({stream, c10::Event(device.type())});
    found = std::prev(copies.end());
  }
  found->event.record(stream);
}

void PinnedCopies::wait() {
  for (const Pending& copy : std::exchange(pending(), {})) copy.event.synchronize();
}

}  // namespace infinitybatch
