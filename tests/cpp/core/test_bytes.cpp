#include <infinitybatch/core/bytes.hpp>
#include <infinitybatch/core/errors.hpp>

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <utility>

namespace infinitybatch {
namespace {

TEST(ParseBytes, ReadsNumbersAndUnits) {
  const std::pair<const char*, int64_t> table[] = {
      {"0", 0},
      {"1048576", 1048576},
      {"96B", 96},
      {"64kB", 64'000},
      {"64KB", 64'000},
      {"3MB", 3'000'000},
      {"24M", 24'000'000},
      {"2g", 2'000'000'000},
      {"2GB", 2'000'000'000},
      {"1TB", 1'000'000'000'000},
      {"1KiB", 1024},
      {"512MiB", 536870912},
      {"1.5 GiB", 1610612736},
      {"2TiB", 2199023255552},
      {"  12 mib  ", 12582912},
      {"0.5GIB", 536870912},
      {"1e3", 1000},
      {"0.3B", 0},
      {"8388607TiB", 9223370937343148032},
  };
  for (const auto& [text, bytes] : table) EXPECT_EQ(parse_bytes(text), bytes) << text;
}

TEST(ParseBytes, RefusesEverythingElseWithAnExample) {
  for (const char* text : {"", " ", "MiB", "12 parsecs", "-1", "-5MiB", "1,5GiB", "12MiBs", "1 2",
                           "nan", "inf", "infMiB", "auto", "80%", "8388608TiB", "1e400", "--3"}) {
    try {
      const int64_t bytes = parse_bytes(text);
      FAIL() << '"' << text << "\" was read as " << bytes;
    } catch (const InvalidArgument& error) {
      const std::string message = error.what();
      EXPECT_NE(message.find('"' + std::string(text) + '"'), std::string::npos) << message;
      EXPECT_NE(message.find("512MiB"), std::string::npos) << message;
    }
  }
}

TEST(FormatBytes, WritesForPeople) {
  const std::pair<int64_t, const char*> table[] = {
      {0, "0 B"},
      {1, "1 B"},
      {96, "96 B"},
      {1023, "1023 B"},
      {1024, "1 KiB"},
      {1536, "1.5 KiB"},
      {10 * 1024 + 300, "10.3 KiB"},
      {150 * 1024 + 600, "151 KiB"},
      {812 * 1048576, "812 MiB"},
      {int64_t{3} << 29, "1.5 GiB"},
      {int64_t{1} << 40, "1 TiB"},
      {int64_t{5000} << 40, "5000 TiB"},
      {-1, "-1 B"},
      {-1536, "-1.5 KiB"},
      {-(int64_t{1} << 30), "-1 GiB"},
      {1048575, "1 MiB"},
      {(int64_t{1} << 30) - 1, "1 GiB"},
  };
  for (const auto& [bytes, text] : table) EXPECT_EQ(format_bytes(bytes), text) << bytes;
}

TEST(FormatBytes, RoundedUpIsEnough) {
  EXPECT_EQ(format_bytes_up((3 << 20) + 1), "3.1 MiB");
  EXPECT_EQ(format_bytes_up(3 << 20), "3 MiB");
  for (int64_t bytes = 1; bytes < int64_t{1} << 50; bytes += bytes / 7 + 1) {
    EXPECT_GE(parse_bytes(format_bytes_up(bytes)), bytes) << format_bytes_up(bytes);
  }
}

TEST(FormatBytes, AndParseBytesAgreeOnTheExtremes) {
  EXPECT_EQ(format_bytes(std::numeric_limits<int64_t>::max()), "8388608 TiB");
  for (const int64_t bytes : {int64_t{0}, int64_t{17}, int64_t{1} << 10, int64_t{7} << 20,
                              int64_t{3} << 29, int64_t{1} << 50}) {
    EXPECT_EQ(parse_bytes(format_bytes(bytes)), bytes);
  }
}

}  // namespace
}  // namespace infinitybatch
