#pragma once

#include <exception>
#include <string>

namespace infinitybatch {

/// The first line of what `error` says, without the backtrace that torch's and the whole traceback
/// that Python's exceptions tell.
std::string first_line_of(const std::exception_ptr& error);

}  // namespace infinitybatch
