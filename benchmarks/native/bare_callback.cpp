// The least that an observer of ops can cost: a callback of RecordFunction that gets inputs and
// outputs, as a recorder must, and does nothing with them. suites/tape.py compiles and loads it.

#include <ATen/record_function.h>

#include <memory>

namespace {

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction&) {
  return nullptr;
}
void end(const at::RecordFunction&, at::ObserverContext*) {}

thread_local at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;

}  // namespace

/// Observes the ops of this thread from now on.
extern "C" void start() {
  handle = at::addThreadLocalCallback(at::RecordFunctionCallback(&begin, &end)
                                          .needsInputs(true)
                                          .needsOutputs(true)
                                          .scopes({at::RecordScope::FUNCTION}));
}

extern "C" void stop() {
  at::removeCallback(handle);
}
