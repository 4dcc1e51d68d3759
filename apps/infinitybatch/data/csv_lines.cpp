#include "data/csv_lines.hpp"

#include "errors.hpp"

#include <algorithm>
#include <utility>

namespace infinitybatch::app {
namespace {

constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";

char most_often(std::string_view line) {
  char best = ',';
  int64_t most = 0;
  for (const char delimiter : {',', ';', '\t'}) {
    bool quoted = false;
    int64_t count = 0;
    for (const char c : line) {
      if (c == '"') quoted = !quoted;
      if (c == delimiter && !quoted) ++count;
    }
    if (count > most) {
      most = count;
      best = delimiter;
    }
  }
  return best;
}

}  // namespace

CsvLines::CsvLines(std::string path, std::string_view text) : path_(std::move(path)), text_(text) {
  if (text_.starts_with(kByteOrderMark)) at_ = kByteOrderMark.size();
  size_t begin = at_;
  while (begin < text_.size() && (text_[begin] == '\n' || text_[begin] == '\r')) ++begin;
  delimiter_ = most_often(text_.substr(begin, text_.find('\n', begin) - begin));
}

/// Fields of the line before are written over, so that no memory is taken for each line.
std::string& CsvLines::begin_field() {
  if (count_ == fields_.size()) fields_.emplace_back();
  std::string& field = fields_[count_++];
  field.clear();
  return field;
}

/// Behind an opening quote. \return false where none closes
bool CsvLines::read_quoted(std::string& field) {
  for (++at_; at_ < text_.size(); ++at_) {
    const char c = text_[at_];
    if (c == '"') {
      if (at_ + 1 == text_.size() || text_[at_ + 1] != '"') {
        ++at_;
        return true;
      }
      ++at_;
    }
    if (c == '\n') ++next_line_;
    field += c;
  }
  return false;
}

bool CsvLines::next() {
  while (at_ < text_.size()) {
    line_ = next_line_;
    count_ = 0;
    std::string* field = &begin_field();
    for (bool ended = false; !ended;) {
      const char c = at_ < text_.size() ? text_[at_] : '\n';
      if (c == '"' && field->find_first_not_of(" \t") == field->npos) {
        field->clear();
        if (!read_quoted(*field)) {
          throw DataError(path_ + ": line " + std::to_string(line_) + ": a quote does not end");
        }
      } else if (c == delimiter_) {
        field = &begin_field();
        ++at_;
      } else if (c == '\n') {
        ended = true;
        ++at_;
      } else {
        *field += c;
        ++at_;
      }
    }
    ++next_line_;
    fields_.resize(count_);
    for (std::string& each : fields_) {
      const size_t begin = each.find_first_not_of(" \t\r");
      each =
          begin == each.npos ? "" : each.substr(begin, each.find_last_not_of(" \t\r") - begin + 1);
    }
    const bool is_blank = fields_.size() == 1 && fields_.front().empty();
    if (!is_blank) return true;
  }
  return false;
}

}  // namespace infinitybatch::app
