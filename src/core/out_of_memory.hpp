#pragma once

#include <exception>
#include <functional>

namespace infinitybatch {

/// Whether `error` says that a device ran out of memory: c10::OutOfMemoryError, or what a
/// registered classifier knows (a Python exception on its way through C++).
bool is_out_of_memory(const std::exception_ptr& error);

/// Adds a kind of exception. For bindings; call it at load time.
void register_out_of_memory(std::function<bool(const std::exception_ptr&)> classifier);

}  // namespace infinitybatch
