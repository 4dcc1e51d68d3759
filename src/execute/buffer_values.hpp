#pragma once

#include <infinitybatch/core/model.hpp>

#include <ATen/core/TensorBody.h>

#include <vector>

namespace infinitybatch {

/// Tensors of all buffers and their values at one moment. Restoring raises no version: graphs that
/// read the buffers stay valid, for they find the same values.
class BufferValues {
 public:
  explicit BufferValues(const std::vector<BufferSlot>& slots);
  void restore() const;

 private:
  struct Entry {
    BufferSlot slot;
    at::Tensor tensor;
    at::Tensor values;
  };
  std::vector<Entry> entries_;
};

}  // namespace infinitybatch
