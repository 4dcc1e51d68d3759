#include "data/compressed.hpp"

#include <fstream>

namespace infinitybatch::app {

DataError compressed(const std::string& path) {
  const std::string packed = path.ends_with(".gz") ? path : path + ".gz";
  return DataError(path + " is compressed; unpack it with: " +
                   (packed == path ? "" : "mv " + path + " " + packed + " && ") + "gunzip " +
                   packed);
}

void refuse_compressed(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  char head[2] = {};
  if (file.read(head, sizeof head) && head[0] == '\x1F' && head[1] == '\x8B') {
    throw compressed(path);
  }
}

}  // namespace infinitybatch::app
