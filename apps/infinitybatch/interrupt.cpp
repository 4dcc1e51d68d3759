#include "interrupt.hpp"

#include "errors.hpp"

#include <csignal>

namespace infinitybatch::app {
namespace {

volatile std::sig_atomic_t arrived = 0;

void note(int signal_number) {
  arrived = signal_number;
}

}  // namespace

void watch_for_interrupts() {
  struct sigaction action = {};
  action.sa_handler = note;
  sigemptyset(&action.sa_mask);
  // SA_RESETHAND: whoever presses Ctrl-C twice does not want to wait for the micro-batch at work.
  action.sa_flags = SA_RESTART | SA_RESETHAND;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

void check_interrupt() {
  if (arrived == SIGINT) {
    throw Interrupted(ExitCode::interrupted, "interrupted");
  }
  if (arrived == SIGTERM) {
    throw Interrupted(ExitCode::terminated, "terminated");
  }
}

}  // namespace infinitybatch::app
