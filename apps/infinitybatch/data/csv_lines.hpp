#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace infinitybatch::app {

/// Takes the text of a .csv file apart (RFC 4180): fields between delimiters, in double quotes
/// where they hold one; lines end in \n or \r\n, blank ones are skipped, and so is a byte order
/// mark.
///
/// Of our own: libraries that are packaged fix the number of columns when they are compiled
/// (libfccp), or are unkept and under a licence that does not suit a wheel (libcsv).
class CsvLines {
 public:
  /// The delimiter is the one that stands most often in the first line: comma, semicolon or tab.
  CsvLines(std::string path, std::string_view text);

  /// Reads the next line that is not blank. \return false at the end
  /// \throws DataError where quotes do not end
  bool next();
  const std::vector<std::string>& fields() const noexcept { return fields_; }
  /// Of the line read last, from 1.
  int64_t line() const noexcept { return line_; }
  char delimiter() const noexcept { return delimiter_; }

 private:
  std::string& begin_field();
  bool read_quoted(std::string& field);

  std::string path_;
  std::string_view text_;
  size_t at_ = 0;
  int64_t line_ = 0;
  int64_t next_line_ = 1;
  char delimiter_ = ',';
  size_t count_ = 0;
  std::vector<std::string> fields_;
};

}  // namespace infinitybatch::app
