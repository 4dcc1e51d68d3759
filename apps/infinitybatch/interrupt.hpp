#pragma once

namespace infinitybatch::app {

/// From now on SIGINT and SIGTERM are noted instead of ending the process at once; a second one
/// ends it as if this had never been called.
void watch_for_interrupts();

/// \throws Interrupted where a signal arrived since `watch_for_interrupts`
void check_interrupt();

}  // namespace infinitybatch::app
