#pragma once

#include "clock.hpp"

#include <ATen/core/TensorBody.h>

namespace sim {

inline bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}

/// A CPU tensor over the same memory, through the mapping that kernels use.
at::Tensor alias_of(const at::Tensor& tensor);

/// Begins a kernel on the current stream of `device`, which becomes current.
class Kernel {
 public:
  Kernel(int device, const char* name);
  ~Kernel();
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  void reads(const at::Tensor& tensor) const { use(tensor, false); }
  void writes(const at::Tensor& tensor) const { use(tensor, true); }
  Moment moment() const { return moment_; }

 private:
  void use(const at::Tensor& tensor, bool write) const;

  const int before_;
  const char* const name_;
  Moment moment_;
};

/// A new tensor of the device.
at::Tensor empty_on(int device, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                    c10::ScalarType type);

/// What a CPU kernel made, as a new tensor of the device.
at::Tensor moved_to(int device, const at::Tensor& result, const Kernel& kernel);

}  // namespace sim
