#include "train/metrics.hpp"

#include <ATen/Functions.h>

#include <algorithm>
#include <cmath>

namespace infinitybatch::app {
namespace {

at::Tensor counts(const at::Tensor& classes, int64_t count) {
  return at::bincount(classes.flatten(), {}, count).to(at::kCPU, at::kDouble);
}

void add_counts(at::Tensor& sum, const at::Tensor& classes, int64_t count) {
  const at::Tensor more = counts(classes, count);
  sum = sum.defined() ? sum + more : more;
}

}  // namespace

const std::vector<std::string>& metric_names() {
  static const std::vector<std::string> names = {"top5", "balanced-accuracy", "macro-f1",
                                                 "perplexity"};
  return names;
}

void Metrics::add(const MicroBatch& rows) {
  if (names_.empty()) return;
  const at::Tensor& scores = rows.outputs.tensor();
  const at::Tensor& targets = rows.targets.tensor();
  const int64_t classes = scores.size(1);
  const at::Tensor best = scores.argmax(1);
  const at::Tensor five = std::get<1>(scores.topk(std::min<int64_t>(5, classes), /*dim=*/1));
  in_five_ += five.eq(targets.unsqueeze(1)).sum().item<double>();
  samples_ += static_cast<double>(targets.numel());
  add_counts(actual_, targets, classes);
  add_counts(predicted_, best, classes);
  add_counts(right_, best.masked_select(best.eq(targets)), classes);
}

std::vector<std::pair<std::string, double>> Metrics::values(double loss) const {
  std::vector<std::pair<std::string, double>> all;
  for (const std::string& name : names_) all.emplace_back(name, value(name, loss));
  return all;
}

double Metrics::value(const std::string& name, double loss) const {
  if (name == "perplexity") return std::exp(loss);
  if (name == "top5") return in_five_ / samples_;
  // Over the classes that there are; for the F1 score also those that were taken for one.
  if (name == "macro-f1") {
    const at::Tensor either = actual_ + predicted_;
    return (2 * right_ / either).masked_select(either.gt(0)).mean().item<double>();
  }
  return (right_ / actual_).masked_select(actual_.gt(0)).mean().item<double>();
}

}  // namespace infinitybatch::app
