#include "models/shared_library.hpp"

#include "errors.hpp"

#include <dlfcn.h>

#include <filesystem>

namespace infinitybatch::app {
namespace {

using Version = const char* (*)();
using Make = void (*)(const command_line::Samples&, std::shared_ptr<command_line::Network>&);

/// Nothing can be unloaded: objects of its classes live as long as the program.
void* open_library(const std::string& path) {
  // A name without a slash would be looked for among the system's libraries.
  void* const library = dlopen(std::filesystem::absolute(path).c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw UsageError("--model " + path + " cannot be loaded: " + one_line(dlerror()) +
                     "; build it as a shared library: c++ -std=c++20 -shared -fPIC net.cpp -o " +
                     path);
  }
  return library;
}

}  // namespace

bool is_shared_library(const std::string& model) {
  const std::string ending = ".so";
  return model.size() > ending.size() &&
         model.compare(model.size() - ending.size(), ending.size(), ending) == 0;
}

std::shared_ptr<Network> load_network(const std::string& path,
                                      const command_line::Samples& samples) {
  if (!std::filesystem::exists(path)) {
    throw UsageError("--model " + path + " does not exist; check the path, or use --model mlp");
  }
  void* const library = open_library(path);
  const auto version = reinterpret_cast<Version>(dlsym(library, "infinitybatch_network_version"));
  const auto make = reinterpret_cast<Make>(dlsym(library, "infinitybatch_make_network"));
  if (version == nullptr || make == nullptr) {
    throw UsageError("--model " + path +
                     " makes no network; write once in it: INFINITYBATCH_NETWORK(Net), of "
                     "infinitybatch/command_line/network.hpp");
  }
  if (std::string(version()) != INFINITYBATCH_NETWORK_VERSION) {
    throw UsageError("--model " + path + " was built for " + version() + ", and this program has " +
                     INFINITYBATCH_NETWORK_VERSION + "; build it anew");
  }
  std::shared_ptr<command_line::Network> network;
  make(samples, network);
  if (!network) throw UsageError("--model " + path + " gave no network; make one in it");
  return network;
}

}  // namespace infinitybatch::app
