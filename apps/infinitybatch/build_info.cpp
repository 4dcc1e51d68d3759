#include "build_info.hpp"

#include <ATen/Version.h>
#include <torch/headeronly/version.h>

#include <filesystem>
#include <system_error>

#ifndef INFINITYBATCH_VERSION
#error "CMake defines INFINITYBATCH_VERSION for this file"
#endif

namespace infinitybatch::app {

std::string version() {
  return INFINITYBATCH_VERSION;
}

std::string version_text() {
  return "infinitybatch " + version() + " (built with torch " + torch_built() + ", running with " +
         torch_loaded() + ")";
}

std::string torch_built() {
  return std::to_string(TORCH_VERSION_MAJOR) + "." + std::to_string(TORCH_VERSION_MINOR) + "." +
         std::to_string(TORCH_VERSION_PATCH);
}

std::string torch_loaded() {
  // The library has no function that returns its version; its build settings name it.
  const std::string config = at::show_config();
  const std::string key = "TORCH_VERSION=";
  const size_t begin = config.find(key);
  if (begin == std::string::npos) {
    return "unknown";
  }
  const size_t end = config.find_first_of(", \n", begin);
  return config.substr(begin + key.size(), end - begin - key.size());
}

std::string data_folder() {
#ifdef INFINITYBATCH_DATA_DIR
  return INFINITYBATCH_DATA_DIR;
#else
  std::error_code ignored;
  const auto program = std::filesystem::read_symlink("/proc/self/exe", ignored);
  return (program.parent_path().parent_path() / "data").string();
#endif
}

}  // namespace infinitybatch::app
