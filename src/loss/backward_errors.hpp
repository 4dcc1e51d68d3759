#pragma once

#include <exception>

namespace infinitybatch {

/// Called with an error of this library that a loss raises inside of somebody else's backward. It
/// may throw what that somebody understands; where it returns, the error goes on as it is.
using BackwardErrorHandler = void (*)(const std::exception_ptr& error);

/// One handler for the process, set once: the bindings', before any loss is used.
void register_backward_error_handler(BackwardErrorHandler handler);

}  // namespace infinitybatch
