#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace infinitybatch::app {

/// True where this program was built with minizip; without, the constructor below says so.
bool reads_zip();

/// A .zip archive, which is what a .npz file is; members are stored or deflated.
class ZipFile {
 public:
  /// \throws DataError where it cannot be read, or this program was built without minizip
  explicit ZipFile(const std::string& path);
  ~ZipFile();
  ZipFile(const ZipFile&) = delete;
  ZipFile& operator=(const ZipFile&) = delete;

  const std::vector<std::string>& members() const noexcept { return members_; }
  /// The unpacked size that the archive states. \throws DataError where there is no such member
  int64_t size_of(const std::string& member);
  /// Unpacks a member. \param into room for `size_of(member)` bytes
  /// \throws DataError where its bytes do not have the checksum that the archive states
  void unpack(const std::string& member, uint8_t* into);

 private:
  void find(const std::string& member);

  std::string path_;
  std::vector<std::string> members_;
  std::shared_ptr<void> archive_;
};

}  // namespace infinitybatch::app
