#include "store/torch_file.hpp"

#include "errors.hpp"
#include "store/atomic_file.hpp"

#include <caffe2/serialize/inline_container.h>

#include <cstdint>

namespace infinitybatch::app {
namespace {

/// Bytes of Python's pickle, protocol 2, as far as a dictionary of tensors needs them.
class Pickled {
 public:
  void op(char code) { bytes_ += code; }
  void global(const std::string& module, const std::string& name) {
    bytes_ += "c" + module + "\n" + name + "\n";
  }
  void text(const std::string& value) {
    bytes_ += 'X';
    little(value.size(), 4);
    bytes_ += value;
  }
  void number(int64_t value) {
    constexpr int kBytes = 8;
    bytes_ += "\x8a";
    bytes_ += static_cast<char>(kBytes);
    little(static_cast<uint64_t>(value), kBytes);
  }
  void tuple(at::IntArrayRef values) {
    op('(');
    for (int64_t value : values) number(value);
    op('t');
  }
  const std::string& bytes() const { return bytes_; }

 private:
  void little(uint64_t value, int count) {
    for (int i = 0; i < count; ++i) bytes_ += static_cast<char>(value >> (8 * i) & 0xFF);
  }

  std::string bytes_ = "\x80\x02";
};

std::string storage_class(at::ScalarType type) {
  return std::string(c10::toString(type)) + "Storage";  // FloatStorage, LongStorage
}

std::string pickled_dictionary(const NamedTensors& tensors) {
  Pickled out;
  out.op('}');
  out.op('(');
  int64_t key = 0;
  for (const auto& [name, tensor] : tensors) {
    out.text(name);
    out.global("torch._utils", "_rebuild_tensor_v2");
    out.op('(');
    out.op('(');
    out.text("storage");
    out.global("torch", storage_class(tensor.scalar_type()));
    out.text(std::to_string(key++));
    out.text("cpu");
    out.number(tensor.numel());
    out.op('t');
    out.op('Q');  // a storage that the reader finds by these
    out.number(0);
    out.tuple(tensor.sizes());
    out.tuple(tensor.strides());
    out.op('\x89');  // requires no gradient
    out.global("collections", "OrderedDict");
    out.op(')');
    out.op('R');
    out.op('t');
    out.op('R');
  }
  out.op('u');
  out.op('.');
  return out.bytes();
}

}  // namespace

void write_torch_file(const std::string& path, const NamedTensors& tensors) {
  NamedTensors values;
  for (const auto& [name, tensor] : tensors) {
    values.emplace_back(name, tensor.detach().cpu().contiguous());
  }
  AtomicFile file(path);
  {
    caffe2::serialize::PyTorchStreamWriter writer([&](const void* data, size_t bytes) {
      file.write(data, bytes);
      return bytes;
    });
    const std::string pickle = pickled_dictionary(values);
    writer.writeRecord("data.pkl", pickle.data(), pickle.size());
    writer.writeRecord("byteorder", "little", 6);
    for (size_t i = 0; i < values.size(); ++i) {
      const at::Tensor& tensor = values[i].second;
      writer.writeRecord("data/" + std::to_string(i), tensor.const_data_ptr(), tensor.nbytes());
    }
    writer.writeEndOfFile();
  }
  file.commit();
}

}  // namespace infinitybatch::app
