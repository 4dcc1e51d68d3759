#include "output/json_lines.hpp"

#include <cstdio>

namespace infinitybatch::app {

void write_json(const std::string& event, const nlohmann::ordered_json& fields) {
  nlohmann::ordered_json line = {{"event", event}};
  line.update(fields);
  // Names of files need not be UTF-8; what cannot be shown is replaced, not refused.
  const std::string text =
      line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  std::fprintf(stdout, "%s\n", text.c_str());
  std::fflush(stdout);
}

}  // namespace infinitybatch::app
