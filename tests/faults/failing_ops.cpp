// Lets the n-th op fail that torch dispatches, whoever calls it: the model, the engine or a step.
// It is a fallback of a dispatch key that torch keeps for tests. A dispatch mode of Python's would
// do the same, but the library sees those (their ops are others' to run) and cuts no forward then.
#include <ATen/core/boxing/KernelFunction.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <atomic>
#include <cstdint>
#include <string>

namespace {

constexpr c10::DispatchKey kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;
std::atomic<int64_t> seen = 0;
std::atomic<int64_t> fails = 0;
std::string last;  // the op that failed

void count(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (++seen == fails) {
    last = op.schema().name();
    // torch's type for what a kernel cannot do: nobody takes it for a shortage of memory.
    C10_THROW_ERROR(NotImplementedError, "failed on purpose: " + last);
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
}

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&count>());
}

}  // namespace

extern "C" {

/// Whether ops of this thread are counted. A recording knows under which keys its ops ran, so this
/// stays as it is for all steps of a test.
void faults_count(int on) {
  c10::impl::tls_set_dispatch_key_included(kKey, on != 0);
}

/// Begins counting at 0 and lets one op fail. \param place from 1; 0 for none
void faults_begin(int64_t place) {
  seen = 0;
  fails = place;
}

int64_t faults_seen() {
  return seen;
}

const char* faults_last() {
  return last.c_str();
}
}
