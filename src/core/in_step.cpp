#include "core/in_step.hpp"

#include <ATen/ThreadLocalPythonObjects.h>
#include <c10/core/SafePyObject.h>

#include <memory>
#include <string>

namespace infinitybatch {
namespace {

using at::impl::ThreadLocalPythonObjects;

// What lies under a name there goes with a backward to the threads of its devices; a variable of
// this thread would not.
const std::string& name() {
  static const std::string name = "infinitybatch.in_step";
  return name;
}

}  // namespace

InStep::InStep() : outermost_(!is()) {
  if (!outermost_) return;
  ThreadLocalPythonObjects::set(name(), std::make_shared<c10::SafePyObject>(nullptr, nullptr));
}

InStep::~InStep() {
  if (outermost_) ThreadLocalPythonObjects::erase(name());
}

bool InStep::is() {
  return ThreadLocalPythonObjects::contains(name());
}

}  // namespace infinitybatch
