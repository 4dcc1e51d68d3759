#include "data/encoding.hpp"

#include "errors.hpp"

#include <algorithm>

namespace infinitybatch::app {

std::string listed(const std::vector<std::string>& names) {
  constexpr size_t kMost = 8;
  std::string list;
  for (size_t i = 0; i < names.size() && i < kMost; ++i) list += (i == 0 ? "" : ", ") + names[i];
  return list + (names.size() > kMost ? ", ..." : "");
}

int64_t class_number(const Encoding& known, const std::string& name, const std::string& where) {
  const auto found = std::find(known.classes.begin(), known.classes.end(), name);
  if (found != known.classes.end()) return found - known.classes.begin();
  throw DataError(
      where + "class '" + name + "' is none that the model was trained on" +
      (known.classes.empty() ? ", whose classes are numbers" : " (" + listed(known.classes) + ")"));
}

std::vector<size_t> places_of(const Encoding& known, const std::vector<std::string>& columns,
                              const std::string& path) {
  std::vector<size_t> places;
  std::vector<bool> taken(known.columns.size(), false);
  for (const std::string& column : columns) {
    size_t place = 0;
    while (place < taken.size() && (taken[place] || known.columns[place] != column)) ++place;
    if (place == taken.size()) {
      throw DataError(path + ": has a column '" + column + "' that the model was not trained on (" +
                      listed(known.columns) + "); leave it out");
    }
    taken[place] = true;
    places.push_back(place);
  }
  const auto missing = std::find(taken.begin(), taken.end(), false);
  if (missing == taken.end()) return places;
  throw DataError(path + ": has no column '" +
                  known.columns[static_cast<size_t>(missing - taken.begin())] +
                  "', which the model was trained on; its columns are " + listed(columns));
}

}  // namespace infinitybatch::app
