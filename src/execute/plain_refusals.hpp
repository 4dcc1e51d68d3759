#pragma once

#include <string>

namespace infinitybatch {

// Why micro-batches cannot leave in Python what the whole batch leaves, by the name of what they
// change.

/// \throws CouplingError
[[noreturn]] void refuse_number(const std::string& name);
/// \throws CouplingError
[[noreturn]] void refuse_object(const std::string& name);
/// \throws CouplingError
[[noreturn]] void refuse_parameter(const std::string& name);
/// \throws CouplingError
[[noreturn]] void refuse_nan(const std::string& name);
/// \throws Unsupported
[[noreturn]] void refuse_generator(const std::string& name);

}  // namespace infinitybatch
