#pragma once

#include "offload/store.hpp"

#include <infinitybatch/memory/statistics.hpp>

#include <ATen/Functions.h>
#include <ATen/core/TensorBody.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace offload_test {

inline const c10::Device kCpu{c10::DeviceType::CPU};

inline int64_t live() {
  return infinitybatch::memory::stats(kCpu).live;
}

/// A directory of its own, removed in the end.
class Directory {
 public:
  Directory() {
    std::string name = (std::filesystem::temp_directory_path() / "offload-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary directory");
    path_ = name;
  }
  ~Directory() { std::filesystem::remove_all(path_); }
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;

  const std::string& path() const { return path_; }
  bool empty() const { return std::filesystem::is_empty(path_); }

 private:
  std::string path_;
};

/// Handles that nobody else has: a braced list would keep copies of them.
template <typename... Tensors>
std::vector<at::Tensor> handles(Tensors&&... tensors) {
  std::vector<at::Tensor> result;
  (result.emplace_back(std::forward<Tensors>(tensors)), ...);
  return result;
}

/// Tensors of odd sizes and their values, to compare with later.
struct Values {
  std::vector<at::Tensor> tensors;
  std::vector<std::vector<char>> bytes;

  explicit Values(const std::vector<int64_t>& sizes) {
    for (const int64_t size : sizes) {
      tensors.push_back(at::randint(256, {size}, at::kLong).to(at::kByte));
      const char* data = static_cast<const char*>(tensors.back().const_data_ptr());
      bytes.emplace_back(data, data + size);
    }
  }
  bool same() const {
    for (size_t i = 0; i < tensors.size(); ++i) {
      const char* data = static_cast<const char*>(tensors[i].const_data_ptr());
      if (!std::equal(bytes[i].begin(), bytes[i].end(), data)) return false;
    }
    return true;
  }
  int64_t total() const {
    int64_t sum = 0;
    for (const auto& one : bytes) sum += static_cast<int64_t>(one.size());
    return sum;
  }
};

}  // namespace offload_test
