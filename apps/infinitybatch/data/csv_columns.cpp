#include "data/csv_columns.hpp"

#include "data/csv_lines.hpp"
#include "errors.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <utility>

namespace infinitybatch::app {
namespace {

constexpr std::array<std::string_view, 5> kUsualNames = {"label", "labels", "class", "target", "y"};

std::string lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

bool is_number(const std::string& field) {
  return csv_number(field).has_value();
}

/// Whether each number is its own position, from 0 or from 1, as columns without names are
/// numbered.
bool counts(const std::vector<std::string>& fields) {
  for (const double begin : {0.0, 1.0}) {
    bool all = true;
    for (size_t i = 0; i < fields.size() && all; ++i) {
      const auto number = csv_number(fields[i]);
      all = !number || *number == begin + static_cast<double>(i);
    }
    if (all) return true;
  }
  return false;
}

/// Whether the first line holds names rather than a sample.
bool has_names(const std::string& path, const std::vector<std::string>& first,
               const std::string& said) {
  if (said != "auto") return said == "yes";
  const auto numbers = std::count_if(first.begin(), first.end(), is_number);
  if (numbers == 0) return true;
  const auto words = static_cast<int64_t>(first.size()) - numbers;
  // One word among numbers is the class of a sample, unless the numbers are those of columns.
  if (words <= 1 && !counts(first)) return false;
  throw UsageError(path +
                   ": line 1 may hold names of columns or a sample; say which with --csv-header "
                   "yes or --csv-header no");
}

std::optional<size_t> column_at(const std::string& text, size_t count) {
  int64_t position = 0;
  const char* const end = text.data() + text.size();
  const auto [read, error] = std::from_chars(text.data(), end, position);
  const auto most = static_cast<int64_t>(count);
  if (error != std::errc() || read != end || position == 0 || std::abs(position) > most) {
    return std::nullopt;
  }
  return static_cast<size_t>(position > 0 ? position - 1 : most + position);
}

size_t label_column(const std::string& path, const std::vector<std::string>& names, size_t count,
                    const std::string& said) {
  const std::string columns =
      "; its columns are " + (names.empty() ? "1 to " + std::to_string(count) : listed(names));
  std::vector<size_t> found;
  for (size_t i = 0; i < names.size(); ++i) {
    const bool usual =
        std::find(kUsualNames.begin(), kUsualNames.end(), lower(names[i])) != kUsualNames.end();
    if (said.empty() ? usual : names[i] == said) found.push_back(i);
  }
  if (found.size() == 1) return found.front();
  if (!said.empty()) {
    const std::optional<size_t> position = column_at(said, count);
    if (found.empty() && position) return *position;
    throw UsageError("--labels " + said + " is " +
                     (found.empty() ? "no column" : "several columns") + " of " + path + columns);
  }
  throw UsageError(path +
                   ": which column holds the classes? Name it with --labels NAME, or by its "
                   "position, --labels 1 or --labels -1 (the last)" +
                   columns);
}

}  // namespace

std::optional<double> csv_number(std::string_view field) {
  if (field.starts_with('+')) field.remove_prefix(1);
  double number = 0;
  const char* const end = field.data() + field.size();
  const auto [read, error] = std::from_chars(field.data(), end, number);
  if (read != end || field.empty()) return std::nullopt;
  if (error == std::errc::result_out_of_range) {
    // Too small is 0; too large is told as not finite.
    const size_t exponent = field.find_first_of("eE");
    return exponent != field.npos && field.substr(exponent + 1).starts_with('-') ? 0.0 : HUGE_VAL;
  }
  return error == std::errc() ? std::optional(number) : std::nullopt;
}

CsvColumns find_columns(const std::string& path, std::string_view text,
                        const DataOptions& options) {
  CsvLines lines(path, text);
  if (!lines.next()) throw DataError(path + ": holds no lines");
  std::vector<std::string> first = lines.fields();
  const size_t count = first.size();
  if (count < 2) {
    throw DataError(path +
                    ": line 1 has one column; features and a class are needed, between "
                    "commas, semicolons or tabs");
  }
  // numpy.savetxt writes its header as a comment.
  const bool is_comment = first.front().starts_with('#');
  if (is_comment) first.front().erase(0, first.front().find_first_not_of("# "));
  if (!is_comment && !has_names(path, first, options.csv_header)) first.clear();
  if (!first.empty() &&
      std::any_of(first.begin(), first.end(), [](auto& n) { return n.empty(); })) {
    throw DataError(path +
                    ": a column has no name in line 1; it may number the lines, which is no "
                    "feature: leave it out, as with pandas' to_csv(index=False)");
  }
  const size_t label = label_column(path, first, count, options.labels);
  return {count, std::move(first), label};
}

}  // namespace infinitybatch::app
