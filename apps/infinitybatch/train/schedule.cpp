#include "train/schedule.hpp"

#include <cmath>
#include <numbers>

namespace infinitybatch::app {

const std::vector<std::string>& schedule_names() {
  static const std::vector<std::string> names = {"constant", "linear", "cosine"};
  return names;
}

double scheduled_lr(const std::string& schedule, double lr, int64_t epoch, int64_t epochs) {
  const double done = static_cast<double>(epoch) / static_cast<double>(epochs);
  if (schedule == "linear") return lr * (1 - done);
  if (schedule == "cosine") return lr * (1 + std::cos(std::numbers::pi * done)) / 2;
  return lr;
}

}  // namespace infinitybatch::app
