#include "data/images.hpp"

#include "data/array.hpp"
#include "data/pixels.hpp"
#include "errors.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <utility>
#include <vector>

namespace infinitybatch::app {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kLargestSide = 65536;
constexpr std::array<const char*, 4> kHeldOut = {"val", "valid", "validation", "test"};

struct Size {
  int64_t height = 0;
  int64_t width = 0;
};

std::string written(const Size& size) {
  return std::to_string(size.height) + "x" + std::to_string(size.width);
}

std::optional<Size> parse_size(const std::string& text) {
  if (text.empty()) return std::nullopt;
  const auto number = [&](const std::string& part) {
    int64_t value = 0;
    const char* const end = part.data() + part.size();
    const auto [read, error] = std::from_chars(part.data(), end, value);
    if (error != std::errc() || read != end || value < 1 || value > kLargestSide) {
      throw UsageError("--image-size must be pixels as in 32 or 32x48 (height, width), not " +
                       text);
    }
    return value;
  };
  const size_t by = text.find('x');
  if (by == std::string::npos) return Size{number(text), number(text)};
  return Size{number(text.substr(0, by)), number(text.substr(by + 1))};
}

/// What is in a folder, by name; hidden files, and those that systems leave in folders, are not.
std::vector<fs::path> entries(const fs::path& folder) {
  std::vector<fs::path> found;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    if (name[0] != '.' && name != "Thumbs.db" && name != "desktop.ini") {
      found.push_back(entry.path());
    }
  }
  std::sort(found.begin(), found.end());
  return found;
}

std::vector<fs::path> folders(const fs::path& folder) {
  std::vector<fs::path> found = entries(folder);
  std::erase_if(found, [](const fs::path& path) { return !fs::is_directory(path); });
  return found;
}

std::vector<std::string> names_of(const std::vector<fs::path>& paths) {
  std::vector<std::string> names;
  for (const fs::path& path : paths) names.push_back(path.filename().string());
  return names;
}

/// Whether the folder has parts, and not the classes themselves (one of which may be called train).
bool is_split(const fs::path& folder) {
  const std::vector<std::string> names = names_of(folders(folder));
  return std::find(names.begin(), names.end(), "train") != names.end() &&
         std::all_of(names.begin(), names.end(), [](const std::string& name) {
           return name == "train" ||
                  std::find(kHeldOut.begin(), kHeldOut.end(), name) != kHeldOut.end();
         });
}

/// The images of one split, class by class.
struct Files {
  fs::path folder;
  std::vector<std::string> paths;
  std::vector<int64_t> classes;
};

Files list(const fs::path& folder, const std::vector<std::string>& classes, bool is_known) {
  Files files{folder, {}, {}};
  for (const fs::path& path : entries(folder)) {
    if (!fs::is_directory(path)) {
      throw DataError(path.string() +
                      ": lies beside folders, which are taken for classes; move it away, or "
                      "give a folder of MNIST-format files (train-images-idx3-ubyte, ...)");
    }
    const std::string name = path.filename().string();
    const auto place = std::find(classes.begin(), classes.end(), name);
    if (place == classes.end()) {
      throw DataError(path.string() + ": is a class that " +
                      (is_known ? "the model was not trained on (" + listed(classes) + ")"
                                : "the folder to train on does not have"));
    }
    for (const fs::path& image : entries(path)) {
      files.paths.push_back(image.string());
      files.classes.push_back(place - classes.begin());
    }
  }
  if (files.paths.empty()) throw DataError(folder.string() + ": has no images in its folders");
  return files;
}

/// Size and channels of all; `size` is that of the first where none is asked for.
struct Shape {
  std::optional<Size> size;
  int64_t channels = 1;
  bool is_known = false;  // of the model
};

void look(const Files& files, bool scales, Shape& shape) {
  for (const std::string& path : files.paths) {
    if (fs::is_directory(path)) {
      throw DataError(path + ": is a folder in the folder of a class; images lie there directly");
    }
    const ImageHeader header = read_image_header(path);
    const Size found{header.height, header.width};
    if (!header.is_grey && shape.is_known && shape.channels == 1) {
      throw DataError(path + ": has colours, and the model was trained on grey images");
    }
    if (!header.is_grey) shape.channels = 3;
    if (!shape.size) shape.size = found;
    if (!scales && (found.height != shape.size->height || found.width != shape.size->width)) {
      throw DataError(path + ": is " + written(found) + " pixels (height x width), " +
                      (shape.is_known ? "the model takes " : "others are ") + written(*shape.size) +
                      "; scale all with --image-size " + written(*shape.size));
    }
  }
}

Labelled decode(const Files& files, const Shape& shape) {
  const auto count = static_cast<int64_t>(files.paths.size());
  const std::string folder = files.folder.string();
  const int64_t one = shape.channels * shape.size->height * shape.size->width;
  uint8_t* pixels = nullptr;
  auto images = MappedFile::scratch(folder, count * one, &pixels);
  for (int64_t i = 0; i < count; ++i) {
    read_image(files.paths[static_cast<size_t>(i)], shape.channels, shape.size->height,
               shape.size->width, pixels + i * one);
  }
  uint8_t* classes = nullptr;
  const auto bytes = count * static_cast<int64_t>(sizeof(int64_t));
  auto labels = MappedFile::scratch(folder, bytes, &classes);
  std::memcpy(classes, files.classes.data(), static_cast<size_t>(bytes));
  const std::vector<int64_t> sizes = {count, shape.channels, shape.size->height, shape.size->width};
  return {folder, folder, array_in_file(std::move(images), 0, sizes, at::kByte),
          array_in_file(std::move(labels), 0, {count}, at::kLong)};
}

}  // namespace

bool looks_like_image_folder(const std::string& path) {
  return !folders(path).empty();
}

ImageData read_image_folder(const std::string& path, const std::string& size,
                            const Encoding* known) {
  const bool known_size = known != nullptr && !known->image_shape.empty();
  const bool inherits = size.empty() && known_size;
  Shape shape{parse_size(inherits ? known->image_size : size), 1};
  const bool scales = shape.size.has_value();
  if (known_size) {
    const std::vector<int64_t>& wanted = known->image_shape;
    shape.channels = wanted[0];
    shape.is_known = true;
    if (!scales) shape.size = Size{wanted[1], wanted[2]};
  }
  fs::path train = path;
  std::optional<fs::path> held_out;
  if (is_split(path)) {
    train = fs::path(path) / "train";
    for (const char* name : kHeldOut) {
      const fs::path other = fs::path(path) / name;
      if (!held_out && fs::is_directory(other)) held_out = other;
    }
  }
  std::vector<std::string> classes = known != nullptr ? known->classes : names_of(folders(train));
  if (classes.empty()) {
    throw DataError(path +
                    ": names its classes, and the model was trained on numbers; give a .npy, "
                    ".npz or IDX file of images");
  }
  const Files files = list(train, classes, known != nullptr);
  std::optional<Files> others;
  if (held_out) others = list(*held_out, classes, known != nullptr);
  look(files, scales, shape);
  if (others) look(*others, scales, shape);
  ImageData data{decode(files, shape), std::nullopt};
  if (others) data.held_out = decode(*others, shape);
  data.train.encoding = {.format = "images",
                         .classes = std::move(classes),
                         .image_shape = {shape.channels, shape.size->height, shape.size->width},
                         .image_size = size};
  return data;
}

}  // namespace infinitybatch::app
