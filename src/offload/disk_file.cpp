#include "offload/disk_file.hpp"

#include "offload/failure_injection.hpp"

#include <infinitybatch/core/errors.hpp>

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <limits>

namespace infinitybatch::offload {
namespace {

constexpr int64_t kEndless = std::numeric_limits<int64_t>::max();

/// The largest size that this process may give a file.
int64_t file_size_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return kEndless;
  return static_cast<int64_t>(std::min<rlim_t>(limit.rlim_cur, kEndless));
}

int open_tmpfile(const std::string& directory, int flags) {
  return open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | flags, S_IRUSR | S_IWUSR);
}

int open_unlinked(const std::string& directory) {
  std::string name = directory + "/infinitybatch-XXXXXX";
  const int descriptor = mkostemp(name.data(), O_CLOEXEC);
  if (descriptor >= 0) unlink(name.c_str());
  return descriptor;
}

bool set_direct(int descriptor, bool direct) {
  const int flags = fcntl(descriptor, F_GETFL);
  if (flags < 0) return false;
  return fcntl(descriptor, F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT) == 0;
}

bool usable(const char* directory) {
  struct stat status{};
  return stat(directory, &status) == 0 && S_ISDIR(status.st_mode) &&
         access(directory, W_OK | X_OK) == 0;
}

}  // namespace

std::string default_directory() {
  const char* chosen = std::getenv("TMPDIR");
  if (chosen != nullptr && *chosen != '\0') return chosen;
  return usable("/var/tmp") ? "/var/tmp" : "/tmp";
}

DiskFile::DiskFile(DiskFileOptions options)
    : directory_(options.directory.empty() ? default_directory() : std::move(options.directory)) {
  if (options.try_tmpfile) descriptor_ = open_tmpfile(directory_, 0);
  tmpfile_ = descriptor_ >= 0;
  if (!tmpfile_) descriptor_ = open_unlinked(directory_);
  if (descriptor_ < 0) {
    throw OffloadError(0, 0,
                       "no file for offloaded tensors can be made in '" + directory_ + "' (" +
                           std::strerror(errno) + "); name a directory that can be written to");
  }
  direct_ = options.try_direct && set_direct(descriptor_, true);
}

DiskFile::~DiskFile() {
  close(descriptor_);
}

bool DiskFile::leave_direct() {
  if (!direct_) return false;
  direct_ = false;
  return set_direct(descriptor_, false);
}

int DiskFile::transfer(char* data, int64_t bytes, int64_t offset, bool writes) {
  if (const int injected = FailDisk::next(); injected != 0) return injected;
  // Past this limit the system would send a signal that ends the process.
  if (writes && offset + bytes > file_size_limit()) return EFBIG;
  while (bytes > 0) {
    const ssize_t done = writes ? pwrite(descriptor_, data, static_cast<size_t>(bytes), offset)
                                : pread(descriptor_, data, static_cast<size_t>(bytes), offset);
    if (done < 0 && errno == EINTR) continue;
    // File systems that cannot pass the page cache by, or only in larger units, say so here.
    if (done < 0 && errno == EINVAL && leave_direct()) continue;
    if (done < 0) return errno;
    if (done == 0) return writes ? ENOSPC : EIO;
    data += done;
    bytes -= done;
    offset += done;
    // What follows a short count need not be aligned.
    if (bytes % kAlignment != 0) leave_direct();
  }
  return 0;
}

int DiskFile::write(const void* data, int64_t bytes, int64_t offset) {
  return transfer(static_cast<char*>(const_cast<void*>(data)), bytes, offset, true);
}

int DiskFile::read(void* data, int64_t bytes, int64_t offset) {
  return transfer(static_cast<char*>(data), bytes, offset, false);
}

int64_t DiskFile::available() const {
  struct statvfs system{};
  struct stat file{};
  if (fstatvfs(descriptor_, &system) != 0 || fstat(descriptor_, &file) != 0) return 0;
  const auto blocks = static_cast<int64_t>(system.f_bavail);
  const auto unit = static_cast<int64_t>(system.f_frsize);
  const int64_t free = blocks > kEndless / unit ? kEndless : blocks * unit;
  return std::min(free, std::max<int64_t>(0, file_size_limit() - file.st_size));
}

}  // namespace infinitybatch::offload
