#include "data/mapped_file.hpp"

#include "errors.hpp"
#include "offload/disk_file.hpp"

#include <infinitybatch/core/bytes.hpp>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

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
    ::munmap(const_cast<uint8_t*>(data_), static_cast<size_t>(std::max<int64_t>(size_, 1)));
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
  if (S_ISDIR(status.st_mode)) {
    fail(path, "is a folder; give a file");
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

std::shared_ptr<const MappedFile> MappedFile::scratch(const std::string& path, int64_t size,
                                                      uint8_t** writable) {
  const std::string directory = offload::default_directory();
  std::string name = directory + "/infinitybatch-XXXXXX";
  Descriptor file{::mkostemp(name.data(), O_CLOEXEC)};
  const auto no_room = [&](int why) {
    fail(path, "no file of " + format_bytes(size) + " for its values can be made in " + directory +
                   " (" + std::strerror(why) + "); set TMPDIR to a folder with room");
  };
  if (file.value < 0) no_room(errno);
  ::unlink(name.c_str());
  // An empty array has no bytes, an empty mapping is an error.
  const auto bytes = static_cast<size_t>(std::max<int64_t>(size, 1));
  // Room is taken now: a full disk would end the process by SIGBUS later.
  const auto room = static_cast<int64_t>(bytes);
  if (const int why = ::posix_fallocate(file.value, 0, room); why != 0) no_room(why);
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.value, 0);
  if (data == MAP_FAILED) no_room(errno);
  *writable = static_cast<uint8_t*>(data);
  return std::shared_ptr<const MappedFile>(new MappedFile(path, *writable, size));
}

}  // namespace infinitybatch::app
