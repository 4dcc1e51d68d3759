#pragma once

#include "data/labelled.hpp"

#include <optional>
#include <string>

namespace infinitybatch::app {

/// The images of a folder, and those that it keeps apart for measuring.
struct ImageData {
  Labelled train;
  std::optional<Labelled> held_out;
};

/// True where the folder has folders in it.
bool looks_like_image_folder(const std::string& path);

/// Reads a folder with a folder of PNG, JPEG or BMP images for each class, in the order of their
/// names; or one with such folders `train` and `val` (or valid, validation, test).
/// \param size "HEIGHTxWIDTH" or one number for both, to which all are scaled; empty: as they are
/// \param known whose classes and size count
/// \return bytes, [n, 1 or 3, height, width]; three channels where one image has colours
/// \throws DataError naming the file: no image, or of another size than the first
ImageData read_image_folder(const std::string& path, const std::string& size,
                            const Encoding* known);

}  // namespace infinitybatch::app
