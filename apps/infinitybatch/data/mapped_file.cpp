#include "data/mapped_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "errors.hpp"

namespace infinitybatch::app {
namespace {

[[noreturn]] void fail(const std::string& path, const std::string& why) {
  throw DataError(path + ": " + why);
}

struct Descriptor {
  int value;
  ~Descriptor() {
    if (value >= 0) {
      ::close(value);
    }
  }
};

}  // namespace

MappedFile::MappedFile(std::string path, const uint8_t* data, int64_t size)
    : path_(std::move(path)), data_(data), size_(size) {}

MappedFile::~MappedFile() {
  if (data_ != nullptr) {
    ::munmap(const_cast<uint8_t*>(data_), static_cast<size_t>(size_));
  }
}

std::shared_ptr<const MappedFile> MappedFile::open(const std::string& path) {
  Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  if (file.value < 0) {
    fail(path, std::string(std::strerror(errno)) + "; check the path and its permissions");
  }
  struct stat status = {};
  if (::fstat(file.value, &status) != 0) {
    fail(path, std::strerror(errno));
  }
  if (!S_ISREG(status.st_mode)) {
    fail(path, "is no regular file; pipes and devices cannot be mapped, save the data to a file");
  }
  if (status.st_size == 0) {
    fail(path, "is empty; was it written completely?");
  }
  void* data =
      ::mmap(nullptr, static_cast<size_t>(status.st_size), PROT_READ, MAP_PRIVATE, file.value, 0);
  if (data == MAP_FAILED) {
    fail(path, std::string("cannot be mapped: ") + std::strerror(errno));
  }
  return std::shared_ptr<const MappedFile>(
      new MappedFile(path, static_cast<const uint8_t*>(data), status.st_size));
}

}  // namespace infinitybatch::app
