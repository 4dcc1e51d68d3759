#pragma once

namespace infinitybatch::app {

/// What the process returns. Documented in `infinitybatch --help`; scripts rely on the numbers.
enum class ExitCode : int {
  ok = 0,
  error = 1,          ///< bad data, a failed check, anything unforeseen
  usage = 2,          ///< a flag or a configuration key that cannot be used
  out_of_memory = 3,  ///< memory budget, the machine's memory or the room to offload do not suffice
  interrupted = 130,  ///< Ctrl-C (SIGINT); 128 + the signal's number, as shells have it
  terminated = 143,   ///< SIGTERM
};

}  // namespace infinitybatch::app
