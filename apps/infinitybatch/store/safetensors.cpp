#include "store/safetensors.hpp"

#include "data/mapped_file.hpp"
#include "errors.hpp"
#include "store/atomic_file.hpp"

#include <ATen/Functions.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <memory>

namespace infinitybatch::app {
namespace {

using StoredJson = nlohmann::ordered_json;

constexpr int64_t kLengthBytes = 8;
constexpr uint64_t kLongestHeader = 100'000'000;  // as the format's own reader

const std::vector<std::pair<std::string, at::ScalarType>>& stored_types() {
  static const std::vector<std::pair<std::string, at::ScalarType>> types = {
      {"F64", at::kDouble}, {"F32", at::kFloat}, {"F16", at::kHalf},  {"BF16", at::kBFloat16},
      {"I64", at::kLong},   {"I32", at::kInt},   {"I16", at::kShort}, {"I8", at::kChar},
      {"U8", at::kByte},    {"BOOL", at::kBool}};
  return types;
}

std::string stored_type(const std::string& name, at::ScalarType type) {
  for (const auto& [text, known] : stored_types()) {
    if (known == type) return text;
  }
  throw SaveError("the tensor " + name + " is of type " + c10::toString(type) +
                  ", which safetensors do not have");
}

[[noreturn]] void refuse_stored(const std::string& path, const std::string& why) {
  throw DataError(path + ": " + why);
}

at::Tensor stored_tensor(const std::shared_ptr<const MappedFile>& file, int64_t data,
                         const std::string& name, const StoredJson& entry) {
  const std::string damaged = "the entry of " + name + " is damaged; save the file again";
  const auto type_name = entry.at("dtype").get<std::string>();
  const auto shape = entry.at("shape").get<std::vector<int64_t>>();
  const auto offsets = entry.at("data_offsets").get<std::vector<int64_t>>();
  const auto& types = stored_types();
  const auto found = std::find_if(types.begin(), types.end(),
                                  [&](const auto& type) { return type.first == type_name; });
  if (found == types.end()) {
    refuse_stored(file->path(), name + " is of type " + type_name + ", which is not read");
  }
  const auto item = static_cast<int64_t>(c10::elementSize(found->second));
  int64_t bytes = item;
  for (int64_t size : shape) {
    if (size < 0 || __builtin_mul_overflow(bytes, size, &bytes)) {
      refuse_stored(file->path(), damaged);
    }
  }
  if (offsets.size() != 2 || offsets[0] < 0 || offsets[1] < offsets[0] ||
      offsets[1] - offsets[0] != bytes) {
    refuse_stored(file->path(), damaged);
  }
  if (offsets[1] > file->size() - data) {
    refuse_stored(file->path(), "is cut off: " + name + " ends at byte " +
                                    std::to_string(data + offsets[1]) + " of " +
                                    std::to_string(file->size()) + "; copy or save it again");
  }
  const uint8_t* begin = file->data() + data + offsets[0];
  if (reinterpret_cast<uintptr_t>(begin) % static_cast<uintptr_t>(item) != 0) {
    at::Tensor copy = at::empty(shape, found->second);
    std::memcpy(copy.mutable_data_ptr(), begin, static_cast<size_t>(bytes));
    return copy;
  }
  return at::from_blob(
      const_cast<uint8_t*>(begin), shape, [file](void*) {}, at::TensorOptions(found->second));
}

}  // namespace

void write_safetensors(const std::string& path, NamedTensors tensors,
                       const std::map<std::string, std::string>& metadata) {
  // Wide elements first: each tensor is aligned, as readers that map the file like it.
  std::stable_sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) {
    return a.second.element_size() > b.second.element_size();
  });
  StoredJson header = StoredJson::object();
  header["__metadata__"] = metadata;
  size_t at = 0;
  for (const auto& [name, tensor] : tensors) {
    header[name] = {{"dtype", stored_type(name, tensor.scalar_type())},
                    {"shape", tensor.sizes().vec()},
                    {"data_offsets", {at, at + tensor.nbytes()}}};
    at += tensor.nbytes();
  }
  std::string text = header.dump(-1, ' ', false, StoredJson::error_handler_t::replace);
  text.resize((text.size() + kLengthBytes - 1) / kLengthBytes * kLengthBytes, ' ');
  AtomicFile file(path);
  const uint64_t length = text.size();
  file.write(&length, sizeof length);
  file.write(text);
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor values = tensor.detach().cpu().contiguous();
    file.write(values.const_data_ptr(), values.nbytes());
  }
  file.commit();
}

StoredTensors read_safetensors(const std::string& path) {
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) refuse_stored(path, "there is no such file");
  if (!std::filesystem::is_regular_file(path, ignored)) {
    refuse_stored(path, "is no file; name the .safetensors file that train --save wrote");
  }
  const char* not_one = "is no safetensors file; name the one that train --save wrote";
  if (std::filesystem::file_size(path, ignored) < kLengthBytes) refuse_stored(path, not_one);
  const auto file = MappedFile::open(path);
  uint64_t length = 0;
  std::memcpy(&length, file->data(), sizeof length);
  if (length > kLongestHeader || static_cast<int64_t>(length) > file->size() - kLengthBytes) {
    refuse_stored(path, not_one);
  }
  const auto data = kLengthBytes + static_cast<int64_t>(length);
  StoredTensors stored;
  stored.path = path;
  try {
    const StoredJson header = StoredJson::parse(file->data() + kLengthBytes, file->data() + data);
    for (const auto& [name, entry] : header.items()) {
      if (name == "__metadata__") {
        stored.metadata = entry.get<std::map<std::string, std::string>>();
      } else {
        stored.tensors[name] = stored_tensor(file, data, name, entry);
      }
    }
  } catch (const StoredJson::exception&) {
    refuse_stored(path, not_one);
  }
  return stored;
}

}  // namespace infinitybatch::app
