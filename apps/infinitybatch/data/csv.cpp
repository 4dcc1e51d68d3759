#include "data/csv.hpp"

#include "data/array.hpp"
#include "data/csv_columns.hpp"
#include "data/csv_lines.hpp"
#include "data/mapped_file.hpp"
#include "errors.hpp"

#include <cmath>
#include <cstring>
#include <map>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace infinitybatch::app {
namespace {

constexpr double kMostExact = 9007199254740992.0;  // 2^53

std::string_view text_of(const MappedFile& file) {
  return {reinterpret_cast<const char*>(file.data()), static_cast<size_t>(file.size())};
}

/// Where something is wrong, for messages.
class Place {
 public:
  Place(const std::string& path, const CsvColumns& columns, const CsvLines& lines)
      : path_(path), columns_(columns), lines_(lines) {}

  [[noreturn]] void refuse(const std::string& why) const {
    throw DataError(path_ + ": line " + std::to_string(lines_.line()) + " " + why);
  }
  [[noreturn]] void refuse(size_t column, const std::string& why) const {
    throw DataError(of(column) + why);
  }
  std::string of(size_t column) const {
    return path_ + ": line " + std::to_string(lines_.line()) + " column " + columns_.name(column) +
           ": ";
  }

 private:
  const std::string& path_;
  const CsvColumns& columns_;
  const CsvLines& lines_;
};

double feature(const std::string& field, size_t column, const Place& place) {
  const std::optional<double> number = csv_number(field);
  if (number && std::isfinite(*number)) return *number;
  if (field.empty()) place.refuse(column, "is empty; fill it in, or leave the line out");
  const bool comma = field.find(',') != field.npos && field.find('.') == field.npos;
  place.refuse(column, "'" + field + "' is not a " + (number ? "finite " : "") + "number" +
                           (comma ? "; write a point in place of the comma" : ""));
}

/// Classes line by line: all are whole numbers, or all are names.
class Classes {
 public:
  explicit Classes(const Encoding* known) : known_(known) {}

  void add(const std::string& field, size_t column, const Place& place) {
    const std::optional<double> number = csv_number(field);
    if (field.empty()) place.refuse(column, "has no class");
    if (first_.empty()) {
      first_ = field;
      named_ = !number;
    }
    if (named_ == number.has_value()) {
      place.refuse(column, "class '" + field + "' is a " + (number ? "number" : "name") +
                               ", others are " + (named_ ? "names" : "numbers") + " ('" + first_ +
                               "')");
    }
    if (known_ != nullptr && named_ == known_->classes.empty()) {
      place.refuse(column, "class '" + field + "' is a " + (named_ ? "name" : "number") +
                               ", and the model was trained on " +
                               (named_ ? "numbers" : "names (" + listed(known_->classes) + ")"));
    }
    if (named_ && known_ != nullptr) {
      values_.push_back(class_number(*known_, field, place.of(column)));
    } else if (named_) {
      values_.push_back(names_.emplace(field, static_cast<int64_t>(names_.size())).first->second);
    } else if (std::abs(*number) <= kMostExact && std::floor(*number) == *number) {
      values_.push_back(static_cast<int64_t>(*number));
    } else {
      place.refuse(column, "class " + field + " is not a whole number");
    }
  }

  /// Names are numbered by alphabet, whichever line they stand in.
  std::vector<int64_t> take() {
    if (known_ != nullptr) return std::move(values_);
    std::vector<int64_t> number_of(names_.size());
    int64_t number = 0;
    for (const auto& [name, seen] : names_) number_of[static_cast<size_t>(seen)] = number++;
    if (named_) {
      for (int64_t& value : values_) value = number_of[static_cast<size_t>(value)];
    }
    return std::move(values_);
  }

  /// In their order.
  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const auto& [name, seen] : names_) names.push_back(name);
    return names;
  }

 private:
  const Encoding* known_;
  bool named_ = false;
  std::string first_;
  std::map<std::string, int64_t> names_;
  std::vector<int64_t> values_;
};

/// Where the features of the file's columns lie in a sample; that of the classes lies nowhere.
std::vector<size_t> places(const std::string& path, const CsvColumns& columns,
                           const Encoding* known) {
  std::vector<std::string> names = columns.features();
  const size_t features = columns.count() - 1;
  std::vector<size_t> found;
  if (known != nullptr && !known->columns.empty() && columns.has_header()) {
    found = places_of(*known, names, path);
  } else {
    for (size_t i = 0; i < features; ++i) found.push_back(i);
  }
  found.insert(found.begin() + static_cast<std::ptrdiff_t>(columns.label()), features);
  return found;
}

}  // namespace

Labelled read_csv(const std::string& path, const DataOptions& options, const Encoding* known) {
  const auto file = MappedFile::open(path);
  const CsvColumns columns = find_columns(path, text_of(*file), options);
  int64_t rows = columns.has_header() ? -1 : 0;
  for (CsvLines lines(path, text_of(*file)); lines.next();) ++rows;
  if (rows < 1) throw DataError(path + ": has names of columns but no samples");

  const auto width = static_cast<int64_t>(columns.count()) - 1;
  uint8_t* bytes = nullptr;
  auto inputs = MappedFile::scratch(path, checked_bytes(*file, {rows, width}, 8), &bytes);
  auto* sample = reinterpret_cast<double*>(bytes);
  const std::vector<size_t> place_of = places(path, columns, known);
  Classes classes(known);
  CsvLines lines(path, text_of(*file));
  const Place place(path, columns, lines);
  if (columns.has_header()) lines.next();
  while (lines.next()) {
    const auto& fields = lines.fields();
    if (fields.size() != columns.count()) {
      place.refuse("has " + std::to_string(fields.size()) + " fields, the first has " +
                   std::to_string(columns.count()));
    }
    for (size_t column = 0; column < fields.size(); ++column) {
      if (column == columns.label()) {
        classes.add(fields[column], column, place);
      } else {
        sample[place_of[column]] = feature(fields[column], column, place);
      }
    }
    sample += width;
  }
  const std::vector<int64_t> labels = classes.take();
  const auto size = static_cast<int64_t>(labels.size() * sizeof(int64_t));
  auto label_file = MappedFile::scratch(path, size, &bytes);
  std::memcpy(bytes, labels.data(), static_cast<size_t>(size));
  return {path,
          path + ", column " + columns.name(columns.label()),
          array_in_file(std::move(inputs), 0, {rows, width}, at::kDouble),
          array_in_file(std::move(label_file), 0, {rows}, at::kLong),
          {.format = "csv",
           .classes = classes.names(),
           .columns = columns.features(),
           .labels = options.labels}};
}

}  // namespace infinitybatch::app
