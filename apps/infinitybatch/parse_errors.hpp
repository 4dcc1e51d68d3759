#pragma once

#include <CLI/CLI.hpp>

#include <string>
#include <vector>

namespace infinitybatch::app {

/// What CLI11 found in the flags of `command`, on one line in the user's terms.
std::string told(const CLI::App& command, const CLI::ParseError& error);

/// The same with where to read on.
/// \param command empty where none was given
/// \param arguments as they were typed
std::string describe(const CLI::App& app, const CLI::ParseError& error, const std::string& command,
                     const std::vector<std::string>& arguments);

}  // namespace infinitybatch::app
