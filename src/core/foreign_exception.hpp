#pragma once

#include <exception>
#include <functional>

namespace infinitybatch {

/// Call it first where an exception is caught and code runs before it is thrown on: a language that
/// calls this library may keep a part of the exception in its interpreter (Python's error
/// indicator), where rolling back would meet it. Bindings take that part into `error`.
void keep_foreign_exception(const std::exception_ptr& error) noexcept;

/// For bindings; call it at load time.
void register_exception_keeper(std::function<void(const std::exception_ptr&)> keeper);

}  // namespace infinitybatch
