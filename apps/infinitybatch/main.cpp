#include "commands/commands.hpp"
#include "errors.hpp"
#include "options.hpp"
#include "output/json_lines.hpp"

#include <algorithm>
#include <cstdio>
#include <string_view>

namespace infinitybatch::app {
namespace {

ExitCode run(const Settings& settings) {
  switch (settings.command) {
    case Command::evaluate:
      return run_evaluate(settings);
    case Command::predict:
      return run_predict(settings);
    case Command::export_model:
      return run_export(settings);
    case Command::plan:
      return run_plan(settings);
    case Command::verify:
      return run_verify(settings);
    case Command::bench:
      return run_bench(settings);
    case Command::doctor:
      return run_doctor(settings);
    case Command::train:
      break;
  }
  return run_train(settings);
}

/// One line on stderr; with --json an event as well, so that a reader of stdout knows too.
ExitCode tell(const Failure& failure, bool json) {
  if (json) {
    write_json("error",
               {{"exit_code", static_cast<int>(failure.code)}, {"message", failure.message}});
  }
  std::fprintf(stderr, "infinitybatch: %s\n", failure.message.c_str());
  return failure.code;
}

ExitCode main_of(int argc, const char* const* argv) {
  // Known before the flags are read as a whole, which may fail.
  bool json = std::find(argv, argv + argc, std::string_view("--json")) != argv + argc;
  try {
    const Parsed parsed = parse_command_line(argc, argv);
    if (!parsed.settings) {
      std::fputs(parsed.text.c_str(), stdout);
      return ExitCode::ok;
    }
    json = json || parsed.settings->json;
    return run(*parsed.settings);
  } catch (...) {
    return tell(describe_current_exception(), json);
  }
}

}  // namespace
}  // namespace infinitybatch::app

int main(int argc, char** argv) {
  using infinitybatch::app::ExitCode;
  const ExitCode code = infinitybatch::app::main_of(argc, argv);
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    std::fputs("infinitybatch: stdout could not be written; is the disk full?\n", stderr);
    return static_cast<int>(code == ExitCode::ok ? ExitCode::error : code);
  }
  return static_cast<int>(code);
}
