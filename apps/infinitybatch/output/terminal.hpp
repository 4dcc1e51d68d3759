#pragma once

#include <cstddef>
#include <cstdio>
#include <string>

namespace infinitybatch::app {

/// Where text for people goes: stdout, or stderr where stdout is for machines.
class Terminal {
 public:
  explicit Terminal(std::FILE* stream);

  /// True where somebody watches: a line can be written over.
  bool is_terminal() const noexcept { return is_terminal_; }
  /// True where the terminal shows UTF-8.
  bool is_utf8() const noexcept { return is_utf8_; }
  /// Columns of the terminal now; 80 where it is none.
  size_t columns() const;

  /// Writes a whole line, over a passing one where there is one.
  void line(const std::string& text);
  /// Writes a line that the next one replaces. On a terminal only.
  void passing(const std::string& text);
  void clear_passing();

 private:
  std::FILE* stream_;
  bool is_terminal_;
  bool is_utf8_;
  bool has_passing_ = false;
};

/// The number of columns that a UTF-8 text takes, each code point being one wide.
size_t columns_of(const std::string& text);

/// The first `columns` code points of a UTF-8 text.
std::string cut(const std::string& text, size_t columns);

}  // namespace infinitybatch::app
