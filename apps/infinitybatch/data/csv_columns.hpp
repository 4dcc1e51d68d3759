#pragma once

#include "data/dataset.hpp"

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace infinitybatch::app {

/// The number that a field holds, whatever the locale; empty where it holds anything else.
std::optional<double> csv_number(std::string_view field);

/// What the columns of a .csv file are.
class CsvColumns {
 public:
  CsvColumns(size_t count, std::vector<std::string> names, size_t label)
      : count_(count), names_(std::move(names)), label_(label) {}

  size_t count() const noexcept { return count_; }
  bool has_header() const noexcept { return !names_.empty(); }
  size_t label() const noexcept { return label_; }
  /// Names of all but the classes; empty without a header.
  std::vector<std::string> features() const {
    std::vector<std::string> features = names_;
    if (has_header()) features.erase(features.begin() + static_cast<std::ptrdiff_t>(label_));
    return features;
  }
  /// "'age'", or its position from 1.
  std::string name(size_t column) const {
    return has_header() ? "'" + names_[column] + "'" : std::to_string(column + 1);
  }

 private:
  size_t count_;
  std::vector<std::string> names_;
  size_t label_;
};

/// Finds the column of the classes, and whether the first line holds names.
/// \throws UsageError where that is not clear, with the flag that says it
CsvColumns find_columns(const std::string& path, std::string_view text, const DataOptions& options);

}  // namespace infinitybatch::app
