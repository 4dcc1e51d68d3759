#include "suggest.hpp"

#include <algorithm>
#include <map>
#include <numeric>

namespace infinitybatch::app {
namespace {

/// How many letters must be added, left out or changed (Levenshtein's distance).
size_t distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row.back();
}

/// What flags of before are called now, without dashes.
const std::map<std::string, std::string> kRenamed = {{"park", "offload"},
                                                     {"park-directory", "offload-directory"}};

}  // namespace

std::string suggestion(const std::string& written, const std::vector<std::string>& known) {
  std::string text = written.substr(0, written.find('='));
  std::replace(text.begin(), text.end(), '_', '-');
  const std::string dashes = text.substr(0, text.find_first_not_of('-'));
  if (const auto now = kRenamed.find(text.substr(dashes.size())); now != kRenamed.end()) {
    return ": use " + dashes + now->second;
  }
  size_t best = std::max<size_t>(text.size() / 3, 2) + 1;
  std::string nearest;
  for (const std::string& name : known) {
    if (const size_t d = distance(text, name); d < best) {
      best = d;
      nearest = name;
    }
  }
  return nearest.empty() ? "" : ", did you mean " + nearest + "?";
}

}  // namespace infinitybatch::app
