#pragma once

#include "output/terminal.hpp"
#include "train/training.hpp"

#include <chrono>
#include <cstdint>
#include <string>

namespace infinitybatch::app {

/// The line that shows how far training is. Refreshed by time, not by step: about ten times a
/// second on a terminal; elsewhere (a file, a pipe, CI) a plain line every five seconds.
class ProgressLine {
 public:
  ProgressLine(Terminal& terminal, int64_t epochs);
  void update(const Progress& progress);

 private:
  std::string text(const Progress& progress) const;

  Terminal& terminal_;
  int64_t epochs_;
  std::chrono::steady_clock::duration interval_;
  std::chrono::steady_clock::time_point next_;
  double finished_seconds_ = 0;  // of whole epochs, for the time left
  int64_t epoch_ = 0;
  int64_t before_ = 0;  ///< epochs of another process
  double last_seconds_ = 0;
};

/// A bar of `width` columns.
std::string bar(double share, size_t width, bool utf8);

}  // namespace infinitybatch::app
