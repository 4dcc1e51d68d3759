#include "output/terminal.hpp"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>
#include <string_view>

namespace infinitybatch::app {
namespace {

bool locale_is_utf8() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    if (const char* value = std::getenv(name); value != nullptr && *value != '\0') {
      const std::string_view text(value);
      return text.find("UTF-8") != text.npos || text.find("utf8") != text.npos;
    }
  }
  return false;
}

bool can_be_written_over(std::FILE* stream) {
  const char* name = std::getenv("TERM");
  return ::isatty(fileno(stream)) == 1 && name != nullptr && std::string_view(name) != "dumb";
}

bool begins_code_point(char c) {
  return (static_cast<unsigned char>(c) & 0xC0) != 0x80;
}

}  // namespace

size_t columns_of(const std::string& text) {
  size_t columns = 0;
  for (char c : text) {
    columns += begins_code_point(c) ? 1 : 0;
  }
  return columns;
}

std::string cut(const std::string& text, size_t columns) {
  size_t seen = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (begins_code_point(text[i]) && seen++ == columns) {
      return text.substr(0, i);
    }
  }
  return text;
}

Terminal::Terminal(std::FILE* stream)
    : stream_(stream), is_terminal_(can_be_written_over(stream)), is_utf8_(locale_is_utf8()) {}

size_t Terminal::columns() const {
  constexpr size_t kUsual = 80;
  winsize size = {};
  const bool known = is_terminal_ && ::ioctl(fileno(stream_), TIOCGWINSZ, &size) == 0;
  return known && size.ws_col > 0 ? size.ws_col : kUsual;
}

void Terminal::line(const std::string& text) {
  clear_passing();
  std::fprintf(stream_, "%s\n", text.c_str());
  std::fflush(stream_);
}

void Terminal::passing(const std::string& text) {
  if (!is_terminal_) {
    return;
  }
  // One column less than there are: some terminals wrap when the last one is written.
  std::fprintf(stream_, "\r%s\x1b[K", cut(text, columns() - 1).c_str());
  std::fflush(stream_);
  has_passing_ = true;
}

void Terminal::clear_passing() {
  if (has_passing_) {
    std::fputs("\r\x1b[K", stream_);
    std::fflush(stream_);
    has_passing_ = false;
  }
}

}  // namespace infinitybatch::app
