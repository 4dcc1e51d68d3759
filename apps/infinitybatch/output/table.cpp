#include "output/table.hpp"

#include "output/terminal.hpp"

#include <algorithm>
#include <utility>

namespace infinitybatch::app {
namespace {

constexpr const char* kGap = "  ";

}  // namespace

std::string peak_heading(bool utf8) {
  return utf8 ? "peak ÷ budget" : "peak / budget";
}

Table::Table(std::vector<Column> columns) : columns_(std::move(columns)) {
  for (Column& column : columns_) {
    column.width = std::max(column.width, columns_of(column.heading));
  }
}

std::string Table::heading() const {
  std::vector<std::string> cells;
  for (const Column& column : columns_) {
    cells.push_back(column.heading);
  }
  return row(cells);
}

std::string Table::rule(bool utf8) const {
  std::string line;
  for (const Column& column : columns_) {
    line += line.empty() ? "" : kGap;
    for (size_t i = 0; i < column.width; ++i) {
      line += utf8 ? "─" : "-";
    }
  }
  return line;
}

std::string Table::row(const std::vector<std::string>& cells) const {
  std::string line;
  for (size_t i = 0; i < columns_.size() && i < cells.size(); ++i) {
    const size_t taken = columns_of(cells[i]);
    const std::string blanks(columns_[i].width - std::min(taken, columns_[i].width), ' ');
    line += i == 0 ? "" : kGap;
    line += columns_[i].is_text ? cells[i] + blanks : blanks + cells[i];
  }
  line.erase(line.find_last_not_of(' ') + 1);
  return line;
}

}  // namespace infinitybatch::app
