#pragma once

#include <cstdint>
#include <string>

namespace infinitybatch {

/// Reads a number of bytes: "1048576", "512MiB", "1.5 GiB", "64kB" (B, kB, MB, GB, TB, and the
/// letters alone as in "24M", are powers of 1000; KiB, MiB, GiB, TiB powers of 1024; case does not
/// matter).
/// \throws InvalidArgument for anything else, with an example.
int64_t parse_bytes(const std::string& text);

/// Writes bytes for people: "812 MiB", "1.5 GiB", "96 B". At most one digit after the point.
std::string format_bytes(int64_t bytes);

/// The same, rounded up: whoever gives what is written gives enough.
std::string format_bytes_up(int64_t bytes);

}  // namespace infinitybatch
