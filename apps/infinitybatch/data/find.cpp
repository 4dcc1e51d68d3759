#include "build_info.hpp"
#include "data/dataset.hpp"

#include <cstdlib>
#include <filesystem>

namespace infinitybatch::app {

DataPath find_data(const std::string& name) {
  namespace fs = std::filesystem;
  DataPath result;
  result.tried.push_back(name);
  const bool is_plain_name = name.find('/') == std::string::npos;
  if (is_plain_name) {
    result.tried.push_back("data/" + name);
    if (const char* folder = std::getenv("INFINITYBATCH_DATA"); folder != nullptr && *folder) {
      result.tried.push_back((fs::path(folder) / name).string());
    }
    result.tried.push_back((fs::path(data_folder()) / name).string());
  }
  for (const std::string& path : result.tried) {
    std::error_code ignored;
    if (fs::exists(path, ignored)) {
      result.found = path;
      break;
    }
  }
  return result;
}

}  // namespace infinitybatch::app
