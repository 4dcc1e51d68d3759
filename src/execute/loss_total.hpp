#pragma once

#include <ATen/core/TensorBody.h>

#include <optional>

namespace infinitybatch {

/// The sum of the micro-batches' shares of the loss, in fp64 where the device has it. On the host
/// it is a plain number; on a device a tensor, so that nobody waits for it.
class LossTotal {
 public:
  explicit LossTotal(at::Device device) : device_(device) {}

  void add(const at::Tensor& share);
  /// In the type of what was added first; fp32 where nothing was.
  at::Tensor get() const;

 private:
  at::Device device_;
  double number_ = 0;
  at::Tensor tensor_;  // what could not be read at once; undefined on the host, mostly
  std::optional<at::ScalarType> type_;
};

}  // namespace infinitybatch
