// The only file that knows stb, so that a build without it differs here alone.
#include "data/pixels.hpp"

#include "errors.hpp"

#ifdef INFINITYBATCH_HAS_STB
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wall"
#pragma GCC diagnostic ignored "-Wextra"
#pragma GCC diagnostic ignored "-Wunused-function"
#define STB_IMAGE_STATIC
#define STB_IMAGE_IMPLEMENTATION
#define STBI_ONLY_PNG
#define STBI_ONLY_JPEG
#define STBI_ONLY_BMP
#define STBI_MAX_DIMENSIONS 65536
#include <stb/stb_image.h>
#define STB_IMAGE_RESIZE_STATIC
#define STB_IMAGE_RESIZE_IMPLEMENTATION
#include <stb/stb_image_resize.h>
#pragma GCC diagnostic pop
#endif

#include <memory>
#include <vector>

namespace infinitybatch::app {

#ifdef INFINITYBATCH_HAS_STB

namespace {

[[noreturn]] void unreadable(const std::string& path) {
  const char* why = stbi_failure_reason();
  throw DataError(path + ": cannot be read as a PNG, JPEG or BMP image (" +
                  (why != nullptr ? why : "unknown") + "); remove it or save it again");
}

}  // namespace

bool reads_images() {
  return true;
}

ImageHeader read_image_header(const std::string& path) {
  int width = 0;
  int height = 0;
  int channels = 0;
  if (stbi_info(path.c_str(), &width, &height, &channels) == 0) unreadable(path);
  if (stbi_is_16_bit(path.c_str()) != 0) {
    throw DataError(path + ": has 16 bits a channel where 8 are read; save it with 8 bits");
  }
  return {width, height, channels <= 2};
}

void read_image(const std::string& path, int64_t channels, int64_t height, int64_t width,
                uint8_t* into) {
  int found_width = 0;
  int found_height = 0;
  int found_channels = 0;
  const auto wanted = static_cast<int>(channels);
  const std::unique_ptr<stbi_uc, void (*)(void*)> pixels(
      stbi_load(path.c_str(), &found_width, &found_height, &found_channels, wanted),
      stbi_image_free);
  if (pixels == nullptr) unreadable(path);
  const uint8_t* from = pixels.get();
  std::vector<uint8_t> scaled;
  if (found_width != width || found_height != height) {
    scaled.resize(static_cast<size_t>(width * height * channels));
    if (stbir_resize_uint8(from, found_width, found_height, 0, scaled.data(),
                           static_cast<int>(width), static_cast<int>(height), 0, wanted) == 0) {
      throw DataError(path + ": cannot be scaled; is there memory left?");
    }
    from = scaled.data();
  }
  const int64_t area = width * height;
  for (int64_t channel = 0; channel < channels; ++channel) {
    for (int64_t i = 0; i < area; ++i) into[channel * area + i] = from[i * channels + channel];
  }
}

#else

namespace {

[[noreturn]] void missing(const std::string& path) {
  throw DataError(path +
                  ": this program was built without stb, which reads images; install libstb-dev "
                  "and build it again, or save the images as one array with numpy.save");
}

}  // namespace

bool reads_images() {
  return false;
}

ImageHeader read_image_header(const std::string& path) {
  missing(path);
}

void read_image(const std::string& path, int64_t /*channels*/, int64_t /*height*/,
                int64_t /*width*/, uint8_t* /*into*/) {
  missing(path);
}

#endif

}  // namespace infinitybatch::app
