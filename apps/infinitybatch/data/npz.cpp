#include "data/npz.hpp"

#include "data/npy.hpp"
#include "data/zip.hpp"
#include "errors.hpp"

#include <algorithm>
#include <utility>
#include <vector>

namespace infinitybatch::app {
namespace {

using Names = std::vector<std::string>;

const Names kInputs = {"inputs", "x", "X", "images", "data", "features"};
const Names kLabels = {"labels", "y", "Y", "targets", "target", "classes"};
const std::string kEnding = ".npy";

/// The names under which `numpy.load` has the arrays.
Names arrays_of(const ZipFile& archive) {
  Names names;
  for (const std::string& member : archive.members()) {
    if (member.ends_with(kEnding)) {
      names.push_back(member.substr(0, member.size() - kEnding.size()));
    }
  }
  return names;
}

bool holds(const Names& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

at::Tensor read(const std::string& path, ZipFile& archive, const std::string& name) {
  const std::string member = name + kEnding;
  uint8_t* bytes = nullptr;
  auto file = MappedFile::scratch(path + "[" + name + "]", archive.size_of(member), &bytes);
  archive.unpack(member, bytes);
  return read_npy(std::move(file));
}

/// \param flag that names an array; `given` is what it says
std::string chosen(const std::string& path, const Names& arrays, const std::string& flag,
                   const std::string& given, const Names& usual) {
  if (!given.empty()) {
    if (holds(arrays, given)) return given;
    throw UsageError(flag + " " + given + " is no array of " + path + ", which has " +
                     listed(arrays));
  }
  Names found;
  for (const std::string& name : usual) {
    if (holds(arrays, name)) found.push_back(name);
  }
  if (found.size() == 1) return found.front();
  const bool none = found.empty();
  throw UsageError(path + " has " +
                   (none ? "no array called " : "several arrays that may be meant: ") +
                   listed(none ? usual : found) + "; it has " + listed(arrays) +
                   ": name one with " + flag + " NAME");
}

}  // namespace

NpzData read_npz(const std::string& path, const DataOptions& options) {
  ZipFile archive(path);
  const Names arrays = arrays_of(archive);
  if (arrays.empty()) {
    throw DataError(path + ": holds no NumPy arrays; write it with numpy.savez");
  }
  const auto pair = [&](const std::string& inputs, const std::string& labels) {
    return Labelled{path + "[" + inputs + "]", path + "[" + labels + "]",
                    read(path, archive, inputs), read(path, archive, labels)};
  };
  if (options.inputs.empty() && options.labels.empty() && holds(arrays, "x_train") &&
      holds(arrays, "y_train")) {
    NpzData data{pair("x_train", "y_train"), std::nullopt};
    if (holds(arrays, "x_test") && holds(arrays, "y_test")) {
      data.held_out = pair("x_test", "y_test");
    }
    return data;
  }
  const std::string inputs = chosen(path, arrays, "--inputs", options.inputs, kInputs);
  return {pair(inputs, chosen(path, arrays, "--labels", options.labels, kLabels)), std::nullopt};
}

}  // namespace infinitybatch::app
