#pragma once

#include <string>

namespace infinitybatch::app {

/// This program's version, as CMake's project() has it: "0.1.0".
std::string version();

/// The version, and the torch that it was built with and runs with: for `--version`.
std::string version_text();

/// The version of the torch whose headers this program was built with, as "2.13.0".
std::string torch_built();

/// The version of the torch library that this process has loaded, as "2.13.0"; "unknown" where
/// torch does not say.
std::string torch_loaded();

/// The data that come with the program: the source tree's `data`, or that of the installed package.
std::string data_folder();

}  // namespace infinitybatch::app
