#pragma once

#include "options.hpp"
#include "store/checkpoint.hpp"

#include <CLI/CLI.hpp>

namespace infinitybatch::app {

/// The flags that make the same training again. `settings` have what the data decided.
FlagValues flags_of(const Settings& settings);

/// Fills in, from the checkpoint that --resume names, what the command line left open.
/// \throws UsageError for a flag that would make another training of it; DataError
void read_checkpoint_flags(CLI::App& command, const std::string& path);

/// A command that can be pasted into a shell.
std::string resume_command(const std::string& checkpoint);

}  // namespace infinitybatch::app
