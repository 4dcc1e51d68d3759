#pragma once

#include <exception>
#include <functional>

namespace infinitybatch::coupled {

/// Whether rows that do not suit a function could have caused `error`, so that the function may be
/// tried on others: C++ exceptions, and of a binding's those that its classifier knows. Not what
/// the user throws to end the step.
bool may_be_of_rows(const std::exception_ptr& error);

/// Adds a binding's word on its own exceptions. Call it at load time.
/// \param ends_the_step whether an exception is one of them, and not for rows to cause
void register_row_errors(std::function<bool(const std::exception_ptr&)> ends_the_step);

}  // namespace infinitybatch::coupled
