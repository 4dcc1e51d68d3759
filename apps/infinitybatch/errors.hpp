#pragma once

#include "exit_code.hpp"

#include <infinitybatch/core/errors.hpp>

#include <string>

namespace infinitybatch::app {

/// Flags or configuration keys that cannot be used (exit code 2).
class UsageError : public Error {
 public:
  using Error::Error;
};

/// A file that cannot be read as data (exit code 1). The message begins with the file's name.
class DataError : public Error {
 public:
  using Error::Error;
};

/// A file that cannot be written (exit code 1). The message begins with the file's name.
class SaveError : public Error {
 public:
  using Error::Error;
};

/// The whole batch did not fit in one piece (exit code 3).
class NativeOutOfMemory : public Error {
 public:
  using Error::Error;
};

/// The loss is not finite, or far above where it began (exit code 1).
class Diverged : public Error {
 public:
  using Error::Error;
};

/// Ctrl-C or SIGTERM arrived (exit code 130 or 143).
class Interrupted : public Error {
 public:
  Interrupted(ExitCode code, const std::string& message) : Error(message), code_(code) {}
  ExitCode code() const noexcept { return code_; }

 private:
  ExitCode code_;
};

/// An error as the user sees it: one line, and the code with which the process ends.
struct Failure {
  ExitCode code = ExitCode::error;
  std::string message;
};

/// Describes the exception that is being handled. Call it inside a catch block only.
Failure describe_current_exception();

/// What a full allocator says, without the advice for users of the library.
std::string cause_of(const c10::OutOfMemoryError& error);

/// Puts a text on one line: newlines become "; ", runs of blanks one blank.
std::string one_line(const std::string& text);

}  // namespace infinitybatch::app
