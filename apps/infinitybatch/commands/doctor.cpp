#include "commands/commands.hpp"
#include "doctor/check.hpp"
#include "errors.hpp"
#include "output/json_lines.hpp"
#include "output/terminal.hpp"

#include <functional>
#include <vector>

namespace infinitybatch::app {
namespace {

constexpr size_t kMarkColumns = 8;
constexpr size_t kNameColumns = 14;

struct Look {
  const char* name;
  std::function<Check()> check;
};

/// A look that throws has found something: that is what a doctor is for.
Check look_at(const Look& look) {
  try {
    return look.check();
  } catch (...) {
    Check check(look.name);
    check.health = Health::broken;
    check.finding = describe_current_exception().message;
    check.remedy = "train would fail in the same way";
    return check;
  }
}

const char* word_for(Health health) {
  switch (health) {
    case Health::ok:
      return "ok";
    case Health::note:
      return "note";
    case Health::broken:
      break;
  }
  return "broken";
}

void show(Terminal& terminal, const Check& check) {
  std::string mark = word_for(check.health);
  mark.resize(kMarkColumns, ' ');
  std::string name = check.name;
  name.resize(kNameColumns, ' ');
  terminal.line(mark + name + check.finding);
  if (!check.remedy.empty()) {
    std::string remedy(kMarkColumns + kNameColumns, ' ');
    remedy += "-> ";
    remedy += check.remedy;
    terminal.line(remedy);
  }
}

}  // namespace

ExitCode run_doctor(const Settings& settings) {
  const std::vector<Look> looks = {
      {"versions", check_versions},  {"CPU allocator", check_allocator},
      {"memory limit", check_limit}, {"gradient", check_gradient},
      {"devices", check_devices},    {"memory", check_memory},
      {"threads", check_threads},    {"malloc", check_malloc},
      {"data", check_data},          {"data formats", check_formats}};
  Terminal terminal(settings.json ? stderr : stdout);
  int broken = 0;
  for (const Look& look : looks) {
    const Check check = look_at(look);
    broken += check.health == Health::broken ? 1 : 0;
    show(terminal, check);
    if (settings.json) {
      nlohmann::ordered_json fields = {{"name", check.name},
                                       {"health", word_for(check.health)},
                                       {"finding", check.finding},
                                       {"remedy", check.remedy}};
      fields.update(check.values);
      write_json("check", fields);
    }
  }
  terminal.line("");
  terminal.line(broken == 0 ? "everything that training needs works"
                            : std::to_string(broken) + " of " + std::to_string(looks.size()) +
                                  " checks found something broken");
  if (settings.json) {
    write_json("summary", {{"broken", broken}, {"checks", looks.size()}});
  }
  return broken == 0 ? ExitCode::ok : ExitCode::error;
}

}  // namespace infinitybatch::app
