#pragma once

#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <string>
#include <vector>

namespace infinitybatch::app {

/// By what the values of files become a model's numbers. Learned from the data of the training,
/// kept with the model, and applied to all other data: a class keeps its number, a column its
/// place, a value its scale.
struct Encoding {
  std::string format = {};  ///< "csv", "npz", "images" (a folder of them), "arrays" or "text"
  std::vector<std::string> classes = {};  ///< names by number; empty where classes are numbers
  std::vector<std::string> columns = {};  ///< of a .csv file's features; empty without a header
  std::vector<int64_t> image_shape = {};  ///< [channels, height, width] of a folder of images
  std::string image_size = {};            ///< to which these were scaled, as --image-size said
  std::string labels = {};                ///< as --labels said of a .csv or .npz file
  std::string inputs = {};                ///< as --inputs said of a .npz file
  double mean = 0;                        ///< of all values of the training's inputs
  double deviation = 1;
};

/// "cat, dog, ...", for messages.
std::string listed(const std::vector<std::string>& names);

/// The place of `name` among the classes. \throws DataError, beginning with `where`, for a class
/// that the training did not have
int64_t class_number(const Encoding& known, const std::string& name, const std::string& where);

/// Where each of a file's columns lies among those that a model takes, by their names.
/// \throws DataError, beginning with `path`, naming the column that is missing or too much
std::vector<size_t> places_of(const Encoding& known, const std::vector<std::string>& columns,
                              const std::string& path);

}  // namespace infinitybatch::app
