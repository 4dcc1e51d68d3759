#include "parse_errors.hpp"

#include "errors.hpp"
#include "suggest.hpp"

#include <algorithm>
#include <vector>

namespace infinitybatch::app {
namespace {

std::string flag_of(const CLI::Option& option) {
  return "--" + option.get_single_name();
}

std::vector<std::string> flags_of(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) names.push_back(flag_of(*option));
  return names;
}

/// The long names of all flags and commands of `app`.
std::vector<std::string> names_of(const CLI::App& app) {
  std::vector<std::string> names = flags_of(app);
  for (const CLI::App* command : app.get_subcommands({})) names.push_back(command->get_name());
  return names;
}

bool holds(const std::vector<std::string>& names, const std::string& written) {
  const std::string name = written.substr(0, written.find('='));
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// The first of `app`'s commands that takes the flag, or empty.
std::string command_with(const CLI::App& app, const std::string& flag) {
  for (const CLI::App* command : app.get_subcommands({})) {
    if (holds(flags_of(*command), flag)) return command->get_name();
  }
  return {};
}

/// An argument that nobody reads.
std::string stray(const CLI::App& app, const std::string& extra, const CLI::App& scope,
                  const std::string& command, const std::vector<std::string>& arguments) {
  const auto separator = std::find(arguments.begin(), arguments.end(), "--");
  if (std::find(separator, arguments.end(), extra) != arguments.end()) {
    return "unexpected argument after --: " + extra;
  }
  const auto chosen = std::find(arguments.begin(), arguments.end(), command);
  if (command.empty() || std::find(arguments.begin(), chosen, extra) != chosen) {
    const std::string after = command.empty()                 ? command_with(app, extra)
                              : holds(flags_of(scope), extra) ? command
                                                              : "";
    if (!after.empty()) {
      return extra + " goes after the command: infinitybatch " + after + " " + extra;
    }
  }
  return extra + " is not known" + suggestion(extra, names_of(scope));
}

}  // namespace

std::string told(const CLI::App& command, const CLI::ParseError& error) {
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&error) != nullptr) {
    for (const CLI::Option* option : command.get_options()) {
      const auto given = option->results().size();
      const int most = option->get_items_expected_max();
      if (most > 0 && given > static_cast<size_t>(most)) {
        const std::string times = given == 2 ? "twice" : std::to_string(given) + " times";
        return flag_of(*option) + " was given " + times + "; give it once";
      }
    }
  }
  std::string text = one_line(error.what());
  if (dynamic_cast<const CLI::ValidationError*>(&error) != nullptr) {
    // CLI11 puts a colon behind the flag's name; our validators go on with a verb.
    if (const size_t colon = text.find(": "); colon != text.npos) text.erase(colon, 1);
  }
  return text;
}

std::string describe(const CLI::App& app, const CLI::ParseError& error, const std::string& command,
                     const std::vector<std::string>& arguments) {
  const std::string where =
      "; see: infinitybatch " + command + (command.empty() ? "" : " ") + "--help";
  const CLI::App* scope = command.empty() ? &app : app.get_subcommand(command);
  std::vector<std::string> extras = scope->remaining();
  if (extras.empty()) extras = app.remaining();
  // A mistyped command leaves CLI11 without a command, which it tells first.
  const bool is_extra = dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr;
  if (!extras.empty() && (command.empty() || is_extra)) {
    return stray(app, extras.front(), *scope, command, arguments) + where;
  }
  if (app.get_subcommands().empty()) {
    return "a command is needed: train, evaluate, predict, export, plan, verify, bench or doctor" +
           where;
  }
  return told(*scope, error) + where;
}

}  // namespace infinitybatch::app
