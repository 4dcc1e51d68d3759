#include "output/progress_line.hpp"

#include "output/numbers.hpp"

#include <algorithm>
#include <cmath>

namespace infinitybatch::app {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kWatched{100};
constexpr milliseconds kUnwatched{5000};
constexpr size_t kBarWidth = 20;

}  // namespace

std::string bar(double share, size_t width, bool utf8) {
  const auto filled =
      static_cast<size_t>(std::lround(std::clamp(share, 0.0, 1.0) * static_cast<double>(width)));
  std::string text;
  for (size_t i = 0; i < width; ++i) {
    text += i < filled ? (utf8 ? "━" : "=") : (utf8 ? "─" : "-");
  }
  return text;
}

ProgressLine::ProgressLine(Terminal& terminal, int64_t epochs)
    : terminal_(terminal),
      epochs_(epochs),
      interval_(terminal.is_terminal() ? kWatched : kUnwatched),
      next_(std::chrono::steady_clock::now() + interval_) {}

void ProgressLine::update(const Progress& progress) {
  if (epoch_ == 0) before_ = progress.epoch - 1;
  if (progress.epoch != epoch_) {
    finished_seconds_ += last_seconds_;
    epoch_ = progress.epoch;
  }
  last_seconds_ = progress.seconds;
  const auto now = std::chrono::steady_clock::now();
  if (now < next_) {
    return;
  }
  next_ = now + interval_;
  if (terminal_.is_terminal()) {
    terminal_.passing(text(progress));
  } else {
    terminal_.line(text(progress));
  }
}

std::string ProgressLine::text(const Progress& progress) const {
  const double share = static_cast<double>(progress.done) / static_cast<double>(progress.total);
  const double epochs_done = static_cast<double>(progress.epoch - 1) + share;
  const double per_epoch = (finished_seconds_ + progress.seconds) /
                           std::max(epochs_done - static_cast<double>(before_), 1e-9);
  const double left = per_epoch * (static_cast<double>(epochs_) - epochs_done);
  std::string line =
      "epoch " + std::to_string(progress.epoch) + "/" + std::to_string(epochs_) + " ";
  if (terminal_.is_terminal()) {
    line += bar(share, kBarWidth, terminal_.is_utf8()) + " ";
  }
  line += with_commas(progress.done) + " of " + with_commas(progress.total) + " samples, " +
          with_commas(std::llround(static_cast<double>(progress.done) / progress.seconds)) + "/s";
  if (std::isfinite(progress.loss)) {
    line += ", loss " + fixed(progress.loss, 4);
  }
  return line + ", " + duration(left) + " left";
}

}  // namespace infinitybatch::app
