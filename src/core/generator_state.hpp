#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/MT19937RNGEngine.h>
#include <ATen/core/TensorBody.h>

#include <memory>
#include <optional>

namespace infinitybatch {

/// Where a random generator stands. The CPU's is kept as it lies in memory: torch tells it as a
/// tensor of 5 kB, written word by word, which would count in the budget of whoever keeps it. Those
/// of other devices are kept as torch tells them.
class GeneratorState {
 public:
  /// Read under the generator's lock.
  explicit GeneratorState(at::Generator generator);

  /// Written under the lock of `generator`, of the same device.
  void put_back(at::Generator generator) const;
  bool operator==(const GeneratorState& other) const;

 private:
  std::shared_ptr<const at::mt19937> engine_;  // of the CPU's; shared, for it never changes
  std::optional<double> spare_double_;
  std::optional<float> spare_float_;
  at::Tensor state_;
};

}  // namespace infinitybatch
