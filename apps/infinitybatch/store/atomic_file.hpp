#pragma once

#include <cstddef>
#include <string>

namespace infinitybatch::app {

/// A file that is there as a whole or not at all: written beside `path`, flushed to the disk and
/// renamed. Without `commit` nothing of it stays, and what lay at `path` before is untouched.
class AtomicFile {
 public:
  /// \throws SaveError naming `path`, as do `write` and `commit` (no room, no permission)
  explicit AtomicFile(std::string path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, size_t bytes);
  void write(const std::string& text) { write(text.data(), text.size()); }
  void commit();

 private:
  [[noreturn]] void fail(int error) const;

  std::string path_;
  std::string temporary_;
  int file_ = -1;
};

/// \throws UsageError naming `flag` where no file can be made at `path`: told before hours of work
void check_can_be_written(const std::string& flag, const std::string& path);

/// \param whose what reads `read`: "--data". An empty path is no file
/// \throws UsageError where what is written to `path` would take its place
void check_is_not_read(const std::string& flag, const std::string& path, const std::string& whose,
                       const std::string& read);

}  // namespace infinitybatch::app
