#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/TensorBody.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace infinitybatch {

/// The state of the default random generators: the CPU's, those of `devices`, and every registered
/// foreign source (Python's `random`, NumPy). Generators that the user created are not seen.
class RngSnapshot {
 public:
  static RngSnapshot capture(const std::vector<at::Device>& devices);
  /// Of the foreign sources alone.
  static RngSnapshot capture_foreign();
  void restore() const;

 private:
  std::vector<std::function<void()>> restorers_;
};

/// Adds a source of random numbers that lives outside torch. For bindings; call it at load time.
/// \param save returns a function that puts the state back which it found
/// \param name for people: "random"
/// \param tell gives text that is another one when numbers have been drawn
void register_random_source(std::function<std::function<void()>()> save, std::string name,
                            std::function<std::string()> tell);

/// What the registered sources tell, by name.
std::map<std::string, std::string> tell_foreign_sources();

/// The state of one generator, read and written under its lock.
at::Tensor state_of(at::Generator generator);
void set_state(at::Generator generator, const at::Tensor& state);

}  // namespace infinitybatch
