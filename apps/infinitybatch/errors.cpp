#include "errors.hpp"

#include <c10/util/Exception.h>

#include <new>
#include <utility>

namespace infinitybatch::app {

std::string one_line(const std::string& text) {
  std::string line;
  bool blank = false;
  bool broken = false;
  for (char c : text) {
    if (c == '\n' || c == '\r') {
      broken = true;
    } else if (c == ' ' || c == '\t') {
      blank = true;
    } else {
      if (!line.empty() && broken) {
        line += "; ";
      } else if (!line.empty() && blank) {
        line += ' ';
      }
      line += c;
      blank = broken = false;
    }
  }
  return line;
}

/// The library's options as this program's flags.
static std::string with_flags(std::string text) {
  for (const auto& [option, flag] :
       {std::pair<std::string, std::string>{"memory_budget", "--memory-budget"},
        {"micro_batch_size", "--micro-batch-size"},
        {"host_budget", "--host-budget"}}) {
    for (size_t at = text.find(option); at != text.npos; at = text.find(option, at + flag.size())) {
      text.replace(at, option.size(), flag);
    }
  }
  return text;
}

std::string cause_of(const c10::OutOfMemoryError& error) {
  const std::string prefix = "infinitybatch: ";
  std::string cause = one_line(error.what_without_backtrace());
  cause = cause.substr(0, cause.find(';'));
  return cause.rfind(prefix, 0) == 0 ? cause.substr(prefix.size()) : cause;
}

Failure describe_current_exception() {
  // Read without the backtrace: users get a way out, not a list of frames.
  try {
    throw;
  } catch (const Interrupted& error) {
    return {error.code(), one_line(error.what_without_backtrace())};
  } catch (const UsageError& error) {
    return {ExitCode::usage, one_line(error.what_without_backtrace())};
  } catch (const NativeOutOfMemory& error) {
    return {ExitCode::out_of_memory, one_line(error.what_without_backtrace())};
  } catch (const BudgetExceeded& error) {
    return {ExitCode::out_of_memory, with_flags(one_line(error.what_without_backtrace()))};
  } catch (const OffloadError& error) {
    return {ExitCode::out_of_memory, one_line(error.what_without_backtrace()) +
                                         "; see --offload-directory and --host-budget"};
  } catch (const c10::OutOfMemoryError& error) {
    return {ExitCode::out_of_memory,
            "out of memory: " + cause_of(error) +
                ". Raise --memory-budget, or use a smaller model (--width, --depth)"};
  } catch (const c10::Error& error) {
    return {ExitCode::error, with_flags(one_line(error.what_without_backtrace()))};
  } catch (const std::bad_alloc&) {
    return {ExitCode::out_of_memory,
            "the machine's memory does not suffice; set --memory-budget below what "
            "`infinitybatch doctor` shows as available"};
  } catch (const std::exception& error) {
    return {ExitCode::error, one_line(error.what())};
  }
}

}  // namespace infinitybatch::app
