#pragma once

#include <infinitybatch/core/micro_batch.hpp>

#include <string>
#include <utility>
#include <vector>

namespace infinitybatch::app {

/// The names that `--metrics` takes.
const std::vector<std::string>& metric_names();

/// Metrics of class scores beside loss and accuracy, slice by slice, without keeping outputs.
class Metrics {
 public:
  /// \param names some of `metric_names`
  explicit Metrics(std::vector<std::string> names) : names_(std::move(names)) {}

  void add(const MicroBatch& rows);
  /// In the order that they were asked for. \param loss mean cross entropy of the same samples
  std::vector<std::pair<std::string, double>> values(double loss) const;

 private:
  double value(const std::string& name, double loss) const;

  std::vector<std::string> names_;
  double samples_ = 0;
  double in_five_ = 0;
  // By class: samples that are of it, that were taken for it, and both.
  at::Tensor actual_;
  at::Tensor predicted_;
  at::Tensor right_;
};

}  // namespace infinitybatch::app
