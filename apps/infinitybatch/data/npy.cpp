#include "data/npy.hpp"

#include <cstring>
#include <fstream>
#include <map>

#include "data/array.hpp"
#include "data/mapped_file.hpp"
#include "errors.hpp"

namespace infinitybatch::app {
namespace {

constexpr char kMagic[] = "\x93NUMPY";
constexpr int64_t kMagicBytes = 6;

at::ScalarType scalar_type(const std::string& path, const std::string& name) {
  static const std::map<std::string, at::ScalarType> types = {
      {"|b1", at::kBool},  {"|u1", at::kByte},  {"|i1", at::kChar},
      {"<i2", at::kShort}, {"<i4", at::kInt},   {"<i8", at::kLong},
      {"<f2", at::kHalf},  {"<f4", at::kFloat}, {"<f8", at::kDouble}};
  const auto found = types.find(name);
  if (found == types.end()) {
    throw DataError(path + ": has elements of type '" + name +
                    "'; save it as array.astype('float32') or array.astype('int64')");
  }
  return found->second;
}

}  // namespace

bool looks_like_npy(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  char head[kMagicBytes] = {};
  return file.read(head, kMagicBytes) && std::memcmp(head, kMagic, kMagicBytes) == 0;
}

at::Tensor read_npy(const std::string& path) {
  auto file = MappedFile::open(path);
  const uint8_t* bytes = file->data();
  if (file->size() < kMagicBytes + 4 || std::memcmp(bytes, kMagic, kMagicBytes) != 0) {
    throw DataError(path + ": is no NumPy .npy file (wrong first bytes); write it with numpy.save");
  }
  const int version = bytes[kMagicBytes];
  if (version < 1 || version > 3) {
    throw DataError(path + ": has .npy version " + std::to_string(version) +
                    "; versions 1 to 3 are read");
  }
  // Version 1 gives the header's length in 2 bytes, later ones in 4; little-endian all.
  const int64_t begin = kMagicBytes + (version == 1 ? 4 : 6);
  int64_t length = bytes[kMagicBytes + 2] | (int64_t{bytes[kMagicBytes + 3]} << 8);
  if (version > 1 && file->size() >= begin) {
    length |= (int64_t{bytes[kMagicBytes + 4]} << 16) | (int64_t{bytes[kMagicBytes + 5]} << 24);
  }
  if (file->size() < begin + length) {
    throw DataError(path + ": ends inside its header; the file is incomplete, write it again");
  }
  const std::string text(reinterpret_cast<const char*>(bytes) + begin, static_cast<size_t>(length));
  const NpyHeader header = parse_npy_header(path, text);
  if (header.fortran_order && header.shape.size() > 1) {
    throw DataError(path + ": is in Fortran order; save numpy.ascontiguousarray(array) instead");
  }
  return array_in_file(std::move(file), begin + length, header.shape,
                       scalar_type(path, header.type));
}

}  // namespace infinitybatch::app
