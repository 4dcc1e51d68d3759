#pragma once

#include <exception>
#include <functional>

namespace infinitybatch {

/// Throws `error` so that whoever called torch's engine gets it as it is: on its way through the
/// engine a binding would make something less of it.
[[noreturn]] void throw_through_engine(const std::exception_ptr& error);

/// For bindings; call it at load time. It throws, or returns where it has nothing better.
void register_engine_thrower(std::function<void(const std::exception_ptr&)> thrower);

}  // namespace infinitybatch
