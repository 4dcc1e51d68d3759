#pragma once

#include <CLI/CLI.hpp>

#include <string>

namespace infinitybatch::app {

/// Fills in, from a TOML file with the names of the flags, what the command line left open.
/// \throws UsageError for an unknown key, a section, a value that the flag would not take, a file
///         that cannot be read
void read_config_file(CLI::App& command, const std::string& path);

}  // namespace infinitybatch::app
