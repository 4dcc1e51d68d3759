// The only file that knows minizip, so that a build without it differs here alone.
#include "data/zip.hpp"

#include "errors.hpp"

#ifdef INFINITYBATCH_HAS_MINIZIP
#include <minizip/unzip.h>
#endif

#include <algorithm>
#include <array>

namespace infinitybatch::app {

#ifdef INFINITYBATCH_HAS_MINIZIP

namespace {

constexpr uLong kEncrypted = 1;  // bit of the general purpose flags
constexpr int64_t kMostAtOnce = 1 << 20;

[[noreturn]] void damaged(const std::string& path, const std::string& member) {
  throw DataError(path + ": " + (member.empty() ? "" : "'" + member + "' ") +
                  "cannot be unpacked; the archive is damaged or incomplete, write it again");
}

}  // namespace

bool reads_zip() {
  return true;
}

ZipFile::ZipFile(const std::string& path) : path_(path) {
  archive_ = std::shared_ptr<void>(unzOpen64(path.c_str()), [](void* archive) {
    if (archive != nullptr) unzClose(archive);
  });
  if (archive_ == nullptr) damaged(path, "");
  int status = unzGoToFirstFile(archive_.get());
  while (status == UNZ_OK) {
    std::array<char, 4096> name{};
    status = unzGetCurrentFileInfo64(archive_.get(), nullptr, name.data(), name.size() - 1, nullptr,
                                     0, nullptr, 0);
    if (status != UNZ_OK) damaged(path, "");
    members_.emplace_back(name.data());
    status = unzGoToNextFile(archive_.get());
  }
  if (status != UNZ_END_OF_LIST_OF_FILE) damaged(path, "");
}

ZipFile::~ZipFile() = default;

void ZipFile::find(const std::string& member) {
  constexpr int kWithCase = 1;
  if (unzLocateFile(archive_.get(), member.c_str(), kWithCase) != UNZ_OK) damaged(path_, member);
}

int64_t ZipFile::size_of(const std::string& member) {
  find(member);
  unz_file_info64 info{};
  if (unzGetCurrentFileInfo64(archive_.get(), &info, nullptr, 0, nullptr, 0, nullptr, 0) !=
      UNZ_OK) {
    damaged(path_, member);
  }
  if ((info.flag & kEncrypted) != 0) {
    throw DataError(path_ + ": '" + member + "' is encrypted; write it with numpy.savez");
  }
  const auto size = static_cast<int64_t>(info.uncompressed_size);
  if (size < 0) damaged(path_, member);
  return size;
}

void ZipFile::unpack(const std::string& member, uint8_t* into) {
  int64_t left = size_of(member);
  if (unzOpenCurrentFile(archive_.get()) != UNZ_OK) damaged(path_, member);
  while (left > 0) {
    const auto wanted = static_cast<unsigned>(std::min(left, kMostAtOnce));
    const int done = unzReadCurrentFile(archive_.get(), into, wanted);
    if (done <= 0) damaged(path_, member);
    into += done;
    left -= done;
  }
  if (unzCloseCurrentFile(archive_.get()) != UNZ_OK) damaged(path_, member);
}

#else

bool reads_zip() {
  return false;
}

ZipFile::ZipFile(const std::string& path) : path_(path) {
  throw DataError(path +
                  ": this program was built without minizip, which reads .npz files; install "
                  "libminizip-dev and build it again, or save each array with numpy.save");
}

ZipFile::~ZipFile() = default;
void ZipFile::find(const std::string& /*member*/) {}
int64_t ZipFile::size_of(const std::string& /*member*/) {
  return 0;
}
void ZipFile::unpack(const std::string& /*member*/, uint8_t* /*into*/) {}

#endif

}  // namespace infinitybatch::app
