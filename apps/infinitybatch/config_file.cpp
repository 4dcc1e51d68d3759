#include "config_file.hpp"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <vector>

#include "errors.hpp"
#include "suggest.hpp"

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
    if (equals == 0 || equals == std::string::npos || equals + 1 == line.size()) {
      refuse_line(path, number, line.insert(0, "'"), "' is not: key = value");
    }
    if (line[line.find_first_not_of(" \t", equals + 1)] == '[') {
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

}  // namespace

void read_config_file(CLI::App& command, const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream content;
  if (!file || !(content << file.rdbuf())) {
    throw UsageError("--config: " + path + " cannot be read, or is empty; check the path");
  }
  check_lines(path, content.str());
  std::istringstream text(content.str());
  const auto keys = keys_of(command);
  for (const CLI::ConfigItem& item : CLI::ConfigTOML().from_config(text)) {
    if (std::find(keys.begin(), keys.end(), item.name) == keys.end() || !item.parents.empty()) {
      throw UsageError("--config: " + path + ": the key '" + item.fullname() + "' is not known" +
                       suggestion(item.name, keys) + "; see: infinitybatch " + command.get_name() +
                       " --help");
    }
  }
  std::istringstream again(content.str());
  try {
    command.allow_config_extras(CLI::config_extras_mode::error);
    command.parse_from_stream(again);
  } catch (const CLI::ParseError& error) {
    throw UsageError("--config: " + path + ": " + one_line(error.what()) + "; see: infinitybatch " +
                     command.get_name() + " --help");
  }
}

}  // namespace infinitybatch::app
