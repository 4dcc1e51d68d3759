#pragma once

#include <string>
#include <vector>

namespace infinitybatch::app {

/// A column: its heading; cells are put at its right end unless they are text.
struct Column {
  std::string heading;
  size_t width = 0;  ///< at least this many columns; the heading's width where that is more
  bool is_text = false;
};

/// The heading of a peak's share of the budget.
std::string peak_heading(bool utf8);

/// Lines of a table whose rows come one by one, so widths are fixed from the start. A cell that is
/// too wide moves its row, rather than being cut.
class Table {
 public:
  explicit Table(std::vector<Column> columns);

  std::string heading() const;
  std::string rule(bool utf8) const;
  std::string row(const std::vector<std::string>& cells) const;

 private:
  std::vector<Column> columns_;
};

}  // namespace infinitybatch::app
