#include "data/npy.hpp"
#include "errors.hpp"

#include <cctype>

namespace infinitybatch::app {
namespace {

/// Reads just as much of Python's literals as NumPy writes; nothing is evaluated.
class Reader {
 public:
  Reader(const std::string& path, const std::string& text) : path_(path), text_(text) {}

  [[noreturn]] void fail(const std::string& why) const {
    throw DataError(path_ + ": its NumPy header cannot be read (" + why + " at character " +
                    std::to_string(at_) + "); write it again with numpy.save");
  }

  bool accept(char wanted) {
    skip_blanks();
    if (at_ < text_.size() && text_[at_] == wanted) {
      ++at_;
      return true;
    }
    return false;
  }

  void expect(char wanted) {
    if (!accept(wanted)) {
      fail(std::string("expected '") + wanted + "'");
    }
  }

  std::string string() {
    skip_blanks();
    const char quote = at_ < text_.size() ? text_[at_] : '\0';
    if (quote == '[') {
      throw DataError(path_ + ": holds a structured array; save one plain field of it instead");
    }
    if (quote != '\'' && quote != '"') {
      fail("expected a string");
    }
    const size_t end = text_.find(quote, at_ + 1);
    if (end == std::string::npos) {
      fail("a string does not end");
    }
    std::string value = text_.substr(at_ + 1, end - at_ - 1);
    at_ = end + 1;
    return value;
  }

  bool boolean() {
    skip_blanks();
    for (const auto& [word, value] : {std::pair{"True", true}, std::pair{"False", false}}) {
      if (text_.compare(at_, std::char_traits<char>::length(word), word) == 0) {
        at_ += std::char_traits<char>::length(word);
        return value;
      }
    }
    fail("expected True or False");
  }

  std::vector<int64_t> tuple() {
    std::vector<int64_t> values;
    expect('(');
    while (!accept(')')) {
      values.push_back(number());
      if (!accept(',')) {
        expect(')');
        break;
      }
    }
    return values;
  }

  bool at_end() {
    skip_blanks();
    return at_ == text_.size();
  }

 private:
  void skip_blanks() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_])) != 0) {
      ++at_;
    }
  }

  int64_t number() {
    skip_blanks();
    int64_t value = 0;
    const size_t begin = at_;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') {
      if (__builtin_mul_overflow(value, 10, &value) ||
          __builtin_add_overflow(value, text_[at_] - '0', &value)) {
        fail("a number is too large");
      }
      ++at_;
    }
    if (at_ == begin) {
      fail("expected a number");
    }
    return value;
  }

  const std::string& path_;
  const std::string& text_;
  size_t at_ = 0;
};

}  // namespace

NpyHeader parse_npy_header(const std::string& path, const std::string& text) {
  Reader reader(path, text);
  NpyHeader header;
  bool has_type = false;
  bool has_order = false;
  bool has_shape = false;
  reader.expect('{');
  while (!reader.accept('}')) {
    const std::string key = reader.string();
    reader.expect(':');
    if (key == "descr") {
      header.type = reader.string();
      has_type = true;
    } else if (key == "fortran_order") {
      header.fortran_order = reader.boolean();
      has_order = true;
    } else if (key == "shape") {
      header.shape = reader.tuple();
      has_shape = true;
    } else {
      reader.fail("unknown key '" + key + "'");
    }
    if (!reader.accept(',')) {
      reader.expect('}');
      break;
    }
  }
  if (!reader.at_end() || !has_type || !has_order || !has_shape) {
    reader.fail("descr, fortran_order and shape are needed and nothing else");
  }
  return header;
}

}  // namespace infinitybatch::app
