#pragma once

#include <ATen/core/TensorBody.h>

#include <functional>
#include <vector>

namespace infinitybatch {

/// The state of the default random generators: the CPU's, those of `devices`, and every registered
/// foreign source (Python's `random`, NumPy). Generators that the user created are not seen.
class RngSnapshot {
 public:
  static RngSnapshot capture(const std::vector<at::Device>& devices);
  void restore() const;

 private:
  std::vector<std::function<void()>> restorers_;
};

/// Adds a source of random numbers that lives outside torch. `save` returns a function that puts
/// the state back which it found. For bindings; call it at load time.
void register_random_source(std::function<std::function<void()>()> save);

}  // namespace infinitybatch
