#include "store/atomic_file.hpp"

#include "errors.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <utility>

namespace infinitybatch::app {
namespace {

std::filesystem::path folder_of(const std::string& path) {
  const auto folder = std::filesystem::path(path).parent_path();
  return folder.empty() ? std::filesystem::path(".") : folder;
}

}  // namespace

AtomicFile::AtomicFile(std::string path)
    : path_(std::move(path)), temporary_(path_ + ".part-" + std::to_string(::getpid())) {
  constexpr int kPermissions = 0666;  // less the umask
  file_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, kPermissions);
  if (file_ < 0) fail(errno);
}

AtomicFile::~AtomicFile() {
  if (file_ < 0) return;
  ::close(file_);
  ::unlink(temporary_.c_str());
}

void AtomicFile::write(const void* data, size_t bytes) {
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t done = ::write(file_, at, bytes);
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) fail(errno);
    at += done;
    bytes -= static_cast<size_t>(done);
  }
}

void AtomicFile::commit() {
  // Some file systems tell of a full disk only here.
  if (::fsync(file_) != 0 && errno != EINVAL && errno != ENOTSUP) fail(errno);
  if (::close(std::exchange(file_, -1)) != 0 ||
      std::rename(temporary_.c_str(), path_.c_str()) != 0) {
    const int error = errno;
    ::unlink(temporary_.c_str());
    fail(error);
  }
}

void AtomicFile::fail(int error) const {
  throw SaveError(path_ + " cannot be written: " + std::generic_category().message(error) +
                  "; what was there before is untouched; name a file where there is room");
}

void check_can_be_written(const std::string& flag, const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code ignored;
  const fs::path folder = folder_of(path);
  if (fs::is_directory(path, ignored)) {
    throw UsageError(flag + " " + path + " is a folder; name a file in it, as in: " + flag + " " +
                     (fs::path(path) / "model.safetensors").string());
  }
  const bool is_folder = fs::is_directory(folder, ignored);
  if (!is_folder || ::access(folder.c_str(), W_OK | X_OK) != 0) {
    throw UsageError(
        flag + " " + path + ": the folder " + folder.string() +
        (is_folder ? " cannot be written to" : " is not there; make it with: mkdir -p ") +
        (is_folder ? "; name one that can" : folder.string()));
  }
}

void check_is_not_read(const std::string& flag, const std::string& path, const std::string& whose,
                       const std::string& read) {
  std::error_code ignored;  // one of them is not there
  if (read.empty() || !std::filesystem::equivalent(path, read, ignored)) return;
  throw UsageError(flag + " " + path + " is the file that " + whose +
                   " reads, and would take its place; name another");
}

}  // namespace infinitybatch::app
