#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace infinitybatch::app {

/// A file's bytes, mapped for reading. The pages belong to the file: no tensor allocator counts
/// them and the kernel may drop them, so a data set of any size costs the memory budget nothing.
/// Not covered: a file that another process truncates meanwhile ends this one by SIGBUS.
class MappedFile {
 public:
  /// \throws DataError where the file cannot be read
  static std::shared_ptr<const MappedFile> open(const std::string& path);
  /// Memory in a file without a name, for what is made from a file that cannot be used as it lies:
  /// unpacked, decoded, in another type. It lies in $TMPDIR or /var/tmp and is gone with the
  /// process.
  /// \param path of the file that it is made from, for messages
  /// \param writable where its bytes are filled in
  /// \throws DataError where there is no room for it
  static std::shared_ptr<const MappedFile> scratch(const std::string& path, int64_t size,
                                                   uint8_t** writable);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const noexcept { return path_; }
  const uint8_t* data() const noexcept { return data_; }
  int64_t size() const noexcept { return size_; }

 private:
  MappedFile(std::string path, const uint8_t* data, int64_t size);

  std::string path_;
  const uint8_t* data_;
  int64_t size_;
};

}  // namespace infinitybatch::app
