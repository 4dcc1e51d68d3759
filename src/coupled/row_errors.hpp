#pragma once

#include <exception>
#include <functional>

namespace infinitybatch::coupled {

/// Whether rows that do not suit a function could have caused `error`, so that the function may be
/// tried on others: C++ exceptions, and of a binding's those that its classifier knows. Not what
/// the user throws to end the step.
bool may_be_of_rows(const std::exception_ptr& error);

/// Whether what forward finds could have caused it, where a part of what its first call has made is
/// there and another is not (a flag beside a buffer that is none), and rows could not.
bool may_be_of_state(const std::exception_ptr& error);

/// Adds a binding's word on exceptions that are of state and not of rows. Call it at load time.
void register_state_errors(std::function<bool(const std::exception_ptr&)> of_state);

/// Adds a binding's word on its own exceptions. Call it at load time.
/// \param ends_the_step whether an exception is one of them, and not for rows to cause
void register_row_errors(std::function<bool(const std::exception_ptr&)> ends_the_step);

}  // namespace infinitybatch::coupled
