#include "data/dataset.hpp"

#include "data/compressed.hpp"
#include "data/csv.hpp"
#include "data/idx.hpp"
#include "data/images.hpp"
#include "data/labelled.hpp"
#include "data/npy.hpp"
#include "data/npz.hpp"
#include "data/text.hpp"
#include "errors.hpp"

#include <algorithm>
#include <cctype>
#include <filesystem>

namespace infinitybatch::app {
namespace {

namespace fs = std::filesystem;

constexpr double kUsualHeldOut = 0.2;

/// Reading a pipe that nobody writes to would wait for ever, and data are read more than once.
void check_is_stored(const std::string& path) {
  const fs::file_status status = fs::status(path);
  if (fs::is_regular_file(status) || fs::is_directory(status)) {
    return;
  }
  throw DataError(path + " is a " + (fs::is_fifo(status) ? "pipe" : "device or socket") +
                  ", but data are read more than once; save them to a file first, as in: cat " +
                  path + " > data.txt");
}

/// \param way_out what to give where `name` is no data set that a script makes
std::string find_or_explain(const std::string& name, const std::string& way_out) {
  const DataPath path = find_data(name);
  if (path.found) {
    check_is_stored(*path.found);
    return *path.found;
  }
  std::string message = "no data at " + path.tried.front();
  for (size_t i = 1; i < path.tried.size(); ++i) {
    message += (i + 1 == path.tried.size() ? " or " : ", ") + path.tried[i];
  }
  if (name == "digits") {
    message += "; make them with: python scripts/export_digits.py";
  } else if (name == "mnist") {
    message += "; fetch them with: python scripts/fetch_mnist.py";
  } else {
    message += "; " + way_out;
  }
  throw DataError(message);
}

/// MNIST's files have had two spellings: "train-images-idx3-ubyte" and "train-images.idx3-ubyte".
std::optional<std::string> idx_in(const fs::path& folder, const std::string& part, int dimensions) {
  for (const char* joint : {"-", "."}) {
    const fs::path path = folder / (part + joint + "idx" + std::to_string(dimensions) + "-ubyte");
    if (fs::exists(path)) {
      return path.string();
    }
  }
  return std::nullopt;
}

/// A file of `part` as MNIST is distributed, compressed.
std::optional<std::string> packed_idx_in(const fs::path& folder, const std::string& part) {
  for (const char* rest : {"-images-idx3", "-labels-idx1", "-images.idx3", "-labels.idx1"}) {
    const fs::path path = folder / (part + rest + "-ubyte.gz");
    if (fs::exists(path)) return path.string();
  }
  return std::nullopt;
}

std::optional<Labelled> idx_pair(const fs::path& folder, const std::string& part) {
  const auto images = idx_in(folder, part + "-images", 3);
  const auto labels = idx_in(folder, part + "-labels", 1);
  const auto packed = packed_idx_in(folder, part);
  if ((!images || !labels) && packed) {
    throw compressed(*packed);
  }
  if (!images && !labels) {
    return std::nullopt;
  }
  if (!images || !labels) {
    throw DataError(folder.string() + ": has " + part + (images ? "-images" : "-labels") +
                    " but no " + part + (images ? "-labels-idx1-ubyte" : "-images-idx3-ubyte") +
                    "; both are needed");
  }
  return Labelled{*images, *labels, read_idx(*images), read_idx(*labels)};
}

/// \param held_out what the data bring for measuring, where they do
Dataset in_parts(const std::string& name, const std::string& path, const Labelled& train,
                 const std::optional<Labelled>& held_out, const DataOptions& options,
                 const Encoding* known) {
  if (!held_out) {
    return split_labelled(name, train, options.held_out.value_or(kUsualHeldOut), known);
  }
  if (options.held_out) {
    throw UsageError("--held-out cannot be chosen: " + path + " brings its own held-out samples (" +
                     held_out->inputs_name + "); leave it out");
  }
  return join_labelled(name, train, *held_out, known);
}

Dataset read_folder(const std::string& name, const std::string& path, const DataOptions& options,
                    const Encoding* known) {
  if (!options.labels.empty()) {
    throw UsageError("--labels belongs to a file of inputs, but --data " + name +
                     " is a folder, which has its own labels; leave --labels out");
  }
  if (const auto train = idx_pair(path, "train")) {
    return in_parts(name, path, *train, idx_pair(path, "t10k"), options, known);
  }
  if (!looks_like_image_folder(path)) {
    throw DataError(path +
                    ": has no train-images-idx3-ubyte and train-labels-idx1-ubyte, and no folder "
                    "of images for each class; give a folder with either, or a file");
  }
  const ImageData images = read_image_folder(path, options.image_size, known);
  return in_parts(name, path, images.train, images.held_out, options, known);
}

at::Tensor read_array(const std::string& path) {
  return looks_like_idx(path) ? read_idx(path) : read_npy(path);
}

std::string extension(const std::string& path) {
  std::string text = fs::path(path).extension().string();
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

/// Flags that say something about another kind of data are mistakes.
void check_flags(const DataOptions& options, bool is_npz, bool is_csv, bool is_folder) {
  const auto needs = [&](bool given, bool suits, const char* flag, const char* kind) {
    if (given && !suits) {
      throw UsageError(std::string(flag) + " belongs to " + kind + ", which --data " +
                       options.data + " is not; leave it out");
    }
  };
  needs(!options.inputs.empty(), is_npz, "--inputs", "a .npz file");
  needs(options.csv_header != "auto", is_csv, "--csv-header", "a .csv file");
  needs(!options.image_size.empty(), is_folder, "--image-size", "a folder of images");
}

}  // namespace

Dataset load_dataset(const DataOptions& given, int64_t context, const Encoding* known) {
  DataOptions options = given;
  const std::string path =
      find_or_explain(options.data,
                      "--data takes a folder of IDX files or of images, a .csv, .npz, .npy, IDX or "
                      "text file");
  const bool is_folder = fs::is_directory(path);
  const std::string kind = is_folder ? "" : extension(path);
  const bool is_csv = kind == ".csv" || kind == ".tsv";
  check_flags(options, kind == ".npz", is_csv, is_folder);
  if (is_folder) return read_folder(options.data, path, options, known);
  if (known != nullptr && known->format == (is_csv ? "csv" : kind == ".npz" ? "npz" : "")) {
    if (options.labels.empty()) options.labels = known->labels;
    if (options.inputs.empty()) options.inputs = known->inputs;
  }
  if (kind == ".npz") {
    NpzData data = read_npz(path, options);
    data.train.encoding = {.format = "npz", .labels = options.labels, .inputs = options.inputs};
    return in_parts(options.data, path, data.train, data.held_out, options, known);
  }
  if (is_csv) {
    return in_parts(options.data, path, read_csv(path, options, known), std::nullopt, options,
                    known);
  }
  refuse_compressed(path);
  const bool is_array = looks_like_npy(path) || looks_like_idx(path) || kind == ".npy";
  const double held_out = options.held_out.value_or(kUsualHeldOut);
  if (is_array && options.labels.empty()) {
    throw UsageError("--data " + options.data +
                     " is a file of inputs; give their classes with "
                     "--labels FILE");
  }
  if (!is_array && !options.labels.empty()) {
    throw UsageError("--data " + options.data +
                     " is text, which predicts itself; leave --labels "
                     "out, or give a .npy or IDX file as --data");
  }
  if (!is_array) {
    return read_text(path, context, held_out);
  }
  if (fs::is_directory(options.labels)) {
    throw UsageError("--labels " + options.labels +
                     " is a folder; give the .npy or IDX file of classes in it");
  }
  const std::string labels =
      find_or_explain(options.labels, "--labels takes a .npy or IDX file of classes");
  refuse_compressed(labels);
  const Labelled data{path, options.labels, read_array(path), read_array(labels)};
  return split_labelled(options.data, data, held_out, known);
}

}  // namespace infinitybatch::app
