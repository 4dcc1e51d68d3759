#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace infinitybatch::offload {

struct DiskFileOptions {
  std::string directory;    ///< empty: `default_directory()`
  bool try_tmpfile = true;  ///< else a file that is unlinked as soon as it is open
  bool try_direct = true;   ///< past the system's page cache (O_DIRECT)
};

/// $TMPDIR; else /var/tmp, which lies on a disk where /tmp may lie in memory; else /tmp.
std::string default_directory();

/// A file without a name: the system frees it with the process, however that ends. Where the file
/// system has no such files (O_TMPFILE), one with a name is made and unlinked at once: a process
/// killed in between leaves an empty file.
class DiskFile {
 public:
  /// Offsets, addresses and sizes are multiples of it.
  static constexpr int64_t kAlignment = 4096;

  /// \throws OffloadError where no file can be made in the directory
  explicit DiskFile(DiskFileOptions options);
  ~DiskFile();
  DiskFile(const DiskFile&) = delete;
  DiskFile& operator=(const DiskFile&) = delete;

  /// Both carry on after short counts and interrupts. Safe to call in any thread, one at a time.
  /// \returns 0 or what went wrong, as in errno
  [[nodiscard]] int write(const void* data, int64_t bytes, int64_t offset);
  [[nodiscard]] int read(void* data, int64_t bytes, int64_t offset);

  /// Bytes that the file system, and this process's limit on file sizes, leave.
  int64_t available() const;
  const std::string& directory() const noexcept { return directory_; }
  bool tmpfile() const noexcept { return tmpfile_; }
  /// Whether the page cache is passed by; false once the file system has refused it.
  bool direct() const noexcept { return direct_; }

 private:
  int transfer(char* data, int64_t bytes, int64_t offset, bool writes);
  bool leave_direct();  // false where it was left before

  std::string directory_;
  int descriptor_ = -1;
  bool tmpfile_ = false;
  std::atomic<bool> direct_ = false;  // written by the thread that copies
};

}  // namespace infinitybatch::offload
