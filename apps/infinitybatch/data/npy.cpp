#include "data/npy.hpp"

#include "data/array.hpp"
#include "data/mapped_file.hpp"
#include "errors.hpp"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <limits>
#include <map>
#include <string_view>
#include <utility>

namespace infinitybatch::app {
namespace {

constexpr char kMagic[] = "\x93NUMPY";
constexpr int64_t kMagicBytes = 6;

/// How elements lie in the file, and as what torch has them.
struct ElementType {
  at::ScalarType read;  ///< after conversion
  int64_t bytes = 0;    ///< of one element in the file
  bool swapped = false;
  bool widened = false;  ///< unsigned integers of 16 bits and more, which few of torch's ops take
};

ElementType element_type(const std::string& path, const std::string& name) {
  static const std::map<std::string, at::ScalarType> types = {
      {"b1", at::kBool},   {"u1", at::kByte}, {"i1", at::kChar}, {"i2", at::kShort},
      {"i4", at::kInt},    {"i8", at::kLong}, {"f2", at::kHalf}, {"f4", at::kFloat},
      {"f8", at::kDouble}, {"u2", at::kInt},  {"u4", at::kLong}, {"u8", at::kLong}};
  const bool ordered = !name.empty() && std::string_view("<>|=").find(name[0]) != std::string::npos;
  const auto found = ordered ? types.find(name.substr(1)) : types.end();
  if (found == types.end()) {
    throw DataError(path + ": has elements of type '" + name +
                    "'; save it as array.astype('float32') or array.astype('int64')");
  }
  const int64_t bytes = name[2] - '0';
  const bool is_unsigned = name[1] == 'u' && bytes > 1;
  return {found->second, bytes, name[0] == '>' && bytes > 1, is_unsigned};
}

template <typename From, typename To>
void widen(const std::string& path, const uint8_t* from, uint8_t* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    From value;
    std::memcpy(&value, from + i * static_cast<int64_t>(sizeof value), sizeof value);
    if (static_cast<uint64_t>(value) > static_cast<uint64_t>(std::numeric_limits<To>::max())) {
      throw DataError(path + ": holds " + std::to_string(value) +
                      ", which is above int64; save it as array.astype('float64')");
    }
    const auto wide = static_cast<To>(value);
    std::memcpy(to + i * static_cast<int64_t>(sizeof wide), &wide, sizeof wide);
  }
}

/// The elements from `offset` on in this machine's byte order and a type that torch has.
std::shared_ptr<const MappedFile> converted(const MappedFile& file, int64_t offset, int64_t count,
                                            const ElementType& type) {
  const std::string& path = file.path();
  const uint8_t* from = file.data() + offset;
  uint8_t* bytes = nullptr;
  std::shared_ptr<const MappedFile> result;
  if (type.swapped) {
    result = MappedFile::scratch(path, count * type.bytes, &bytes);
    for (int64_t i = 0; i < count; ++i) {
      std::reverse_copy(from + i * type.bytes, from + (i + 1) * type.bytes, bytes + i * type.bytes);
    }
    from = bytes;
  }
  if (!type.widened) return result;
  uint8_t* wide = nullptr;
  auto widened =
      MappedFile::scratch(path, count * static_cast<int64_t>(c10::elementSize(type.read)), &wide);
  switch (type.bytes) {
    case 2:
      widen<uint16_t, int32_t>(path, from, wide, count);
      break;
    case 4:
      widen<uint32_t, int64_t>(path, from, wide, count);
      break;
    default:
      widen<uint64_t, int64_t>(path, from, wide, count);
  }
  return widened;
}

}  // namespace

bool looks_like_npy(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  char head[kMagicBytes] = {};
  return file.read(head, kMagicBytes) && std::memcmp(head, kMagic, kMagicBytes) == 0;
}

at::Tensor read_npy(const std::string& path) {
  return read_npy(MappedFile::open(path));
}

at::Tensor read_npy(std::shared_ptr<const MappedFile> file) {
  const std::string path = file->path();
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
  const ElementType type = element_type(path, header.type);
  int64_t offset = begin + length;
  if (type.swapped || type.widened) {
    // The file must hold what its header says before it is read in a loop.
    const int64_t expected = checked_bytes(*file, header.shape, type.bytes);
    check_length(*file, offset, expected);
    file = converted(*file, offset, expected / type.bytes, type);
    offset = 0;
  }
  return array_in_file(std::move(file), offset, header.shape, type.read, header.fortran_order);
}

}  // namespace infinitybatch::app
