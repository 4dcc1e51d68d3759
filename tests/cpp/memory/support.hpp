#pragma once

#include <infinitybatch/memory/statistics.hpp>

#include <ATen/Functions.h>
#include <ATen/core/TensorBody.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstdint>
#include <vector>

namespace memory_test {

inline const c10::Device kCpu{c10::DeviceType::CPU};

inline int64_t live() {
  return infinitybatch::memory::stats(kCpu).live;
}

/// `bytes` bytes of uninitialised memory.
inline at::Tensor block(int64_t bytes) {
  return at::empty({bytes}, at::kByte);
}

/// While it lives, torch's CPU allocator is its own default one, as before this library was loaded.
class DefaultAllocatorInForce {
 public:
  DefaultAllocatorInForce() : before_(c10::GetCPUAllocator()) {
    c10::SetAllocator(c10::DeviceType::CPU, c10::GetDefaultCPUAllocator());
  }
  ~DefaultAllocatorInForce() { c10::SetAllocator(c10::DeviceType::CPU, before_); }
  DefaultAllocatorInForce(const DefaultAllocatorInForce&) = delete;
  DefaultAllocatorInForce& operator=(const DefaultAllocatorInForce&) = delete;

 private:
  c10::Allocator* before_;
};

/// A small network with two layers, and one step of training it without the optimizer.
class SmallNetwork {
 public:
  SmallNetwork() {
    parameters_ = {at::randn({24, 40}), at::randn({24}), at::randn({10, 24}), at::randn({10})};
    for (at::Tensor& parameter : parameters_) parameter.set_requires_grad(true);
    inputs_ = at::randn({16, 40});
    targets_ = at::randint(10, {16}, at::kLong);
  }

  at::Tensor loss() const {
    const at::Tensor hidden = at::linear(inputs_, parameters_[0], parameters_[1]).tanh();
    return at::cross_entropy_loss(at::linear(hidden, parameters_[2], parameters_[3]), targets_);
  }

  /// The gradients, leaving none behind. Where the step fails too, no gradient stays.
  std::vector<at::Tensor> step() {
    struct Clear {
      std::vector<at::Tensor>& parameters;
      ~Clear() {
        for (at::Tensor& parameter : parameters) parameter.mutable_grad().reset();
      }
    } clear{parameters_};
    loss().backward();
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& parameter : parameters_) gradients.push_back(parameter.grad());
    return gradients;
  }

 private:
  std::vector<at::Tensor> parameters_;
  at::Tensor inputs_;
  at::Tensor targets_;
};

}  // namespace memory_test
