#pragma once

#include <exception>
#include <functional>
#include <string>
#include <string_view>

namespace infinitybatch {

/// Whether `error` says that a device ran out of memory: c10::OutOfMemoryError, what a registered
/// classifier knows (a Python exception on its way through C++), or anything that tells this
/// library's last refusal in this thread (TorchScript makes a plain RuntimeError of it).
bool is_out_of_memory(const std::exception_ptr& error);

/// An allocation in this thread is refused with this text; empty: none has been yet, what was said
/// before is past.
void note_refusal(std::string text);

/// Whether `text` holds that of the last refusal in this thread.
bool tells_refusal(std::string_view text);

/// Adds a kind of exception. For bindings; call it at load time.
void register_out_of_memory(std::function<bool(const std::exception_ptr&)> classifier);

}  // namespace infinitybatch
