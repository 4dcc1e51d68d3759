#include "config_file.hpp"

#include "errors.hpp"
#include "parse_errors.hpp"
#include "suggest.hpp"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string_view>
#include <vector>

namespace infinitybatch::app {
namespace {

[[noreturn]] void refuse_line(const std::string& path, int number, const std::string& line,
                              const std::string& why) {
  throw UsageError("--config: " + path + ", line " + std::to_string(number) + ": " + line + why);
}

/// CLI11's reader skips what it does not understand; a setting that silently does nothing costs its
/// user an hour. So every line must be blank, a comment, or `key = value`.
void check_lines(const std::string& path, const std::string& text) {
  std::istringstream lines(text);
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    CLI::detail::trim(line);
    if (line.empty() || line.front() == '#') {
      continue;
    }
    if (line.front() == '[') {
      refuse_line(path, number, line, " is a section; the keys are flat, as in: epochs = 40");
    }
    const size_t equals = line.find('=');
    if (equals == 0 || equals == std::string::npos) {
      refuse_line(path, number, line.insert(0, "'"), "' is not: key = value");
    }
    const size_t value = line.find_first_not_of(" \t", equals + 1);
    if (value == std::string::npos || line[value] == '=' || line[value] == '#') {
      throw UsageError("--config: " + path + ", line " + std::to_string(number) +
                       ": expected a value after '" + line.substr(0, equals + 1) +
                       "', as in: epochs = 40");
    }
    if (line[value] == '[') {
      refuse_line(path, number, line, " is a list; each key has one value, as in: epochs = 40");
    }
  }
}

std::vector<std::string> keys_of(const CLI::App& command) {
  std::vector<std::string> keys;
  for (const CLI::Option* option : command.get_options()) {
    if (option->get_configurable()) {
      keys.push_back(option->get_single_name());
    }
  }
  return keys;
}

/// The file's text. A byte order mark before it is skipped, as TOML has it.
std::string text_of(const std::string& path) {
  if (std::error_code ignored; std::filesystem::is_directory(path, ignored)) {
    throw UsageError("--config: " + path + " is a folder; give a TOML file");
  }
  std::ifstream file(path, std::ios::binary);
  std::ostringstream content;
  if (!file || !(content << file.rdbuf())) {
    throw UsageError("--config: " + path + " cannot be read, or is empty; check the path");
  }
  std::string text = content.str();
  constexpr std::string_view kMark = "\xEF\xBB\xBF";
  if (text.compare(0, kMark.size(), kMark) == 0) text.erase(0, kMark.size());
  const bool is_binary = std::any_of(text.begin(), text.end(), [](unsigned char c) {
    return (c < ' ' && c != '\t' && c != '\n' && c != '\r') || c == 0x7F;
  });
  if (is_binary) {
    throw UsageError("--config: " + path +
                     " is not a TOML file; it has lines of: key = value, as in: epochs = 40");
  }
  return text;
}

}  // namespace

void read_config_file(CLI::App& command, const std::string& path) {
  const std::string content = text_of(path);
  check_lines(path, content);
  std::istringstream text(content);
  const auto keys = keys_of(command);
  for (const CLI::ConfigItem& item : CLI::ConfigTOML().from_config(text)) {
    if (std::find(keys.begin(), keys.end(), item.name) == keys.end() || !item.parents.empty()) {
      throw UsageError("--config: " + path + ": the key '" + item.fullname() + "' is not known" +
                       suggestion(item.name, keys) + "; see: infinitybatch " + command.get_name() +
                       " --help");
    }
  }
  std::istringstream again(content);
  try {
    command.allow_config_extras(CLI::config_extras_mode::error);
    command.parse_from_stream(again);
  } catch (const CLI::ParseError& error) {
    throw UsageError("--config: " + path + ": " + told(command, error) + "; see: infinitybatch " +
                     command.get_name() + " --help");
  }
}

}  // namespace infinitybatch::app
