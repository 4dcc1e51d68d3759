#pragma once

#include <ATen/core/TensorBody.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace infinitybatch::app {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// What a safetensors file holds.
struct StoredTensors {
  std::string path;
  std::map<std::string, at::Tensor> tensors;    ///< on the CPU, over the mapped file: read only
  std::map<std::string, std::string> metadata;  ///< of the header's __metadata__
};

/// Writes tensors (of any device) as https://github.com/huggingface/safetensors has them; the file
/// is there as a whole or not at all.
/// \throws SaveError
void write_safetensors(const std::string& path, NamedTensors tensors,
                       const std::map<std::string, std::string>& metadata);

/// \throws DataError naming the file where it is not there, no safetensors file, cut or damaged
StoredTensors read_safetensors(const std::string& path);

}  // namespace infinitybatch::app
