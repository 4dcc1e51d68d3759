#pragma once

#include <cstdint>
#include <string>

namespace infinitybatch::app {

/// True where this program was built with stb; without, the functions below say so.
bool reads_images();

/// What the header of an image file says.
struct ImageHeader {
  int64_t width = 0;
  int64_t height = 0;
  bool is_grey = false;  ///< no colours, transparency aside
};

/// \throws DataError where the file is no PNG, JPEG or BMP image of 8 bits a channel
ImageHeader read_image_header(const std::string& path);

/// Decodes an image, and scales it where it has another size: Mitchell's filter over sRGB values.
/// Transparency is dropped.
/// \param channels 1 or 3 \param into [channels, height, width]
void read_image(const std::string& path, int64_t channels, int64_t height, int64_t width,
                uint8_t* into);

}  // namespace infinitybatch::app
