#pragma once

#include <ATen/core/TensorBody.h>

#include <cstddef>
#include <map>
#include <set>
#include <vector>

namespace infinitybatch {

/// A copy of each, as `clone` gives it. Small ones lie side by side in one memory for each type, so
/// that hundreds of buffers take a few kernels.
std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& tensors);

/// Writes `values[i]` into `tensors[i]`, of the same form, both plain. Raises their versions.
void copy_into(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& values);

/// Which of many tensors have had other bits, or another form, than they should have. Nothing waits
/// for the device before that is asked for.
class BitDifferences {
 public:
  /// \param which names it; small ones are compared with those of other names, together, and are
  ///              held until then
  void note(size_t which, const at::Tensor& before, const at::Tensor& now);
  /// Compares what was noted: tensors may be written after it.
  void flush();
  /// Since the last `clear`.
  std::set<size_t> take();
  void clear();

 private:
  struct Pair {
    size_t which;
    at::Tensor before, now;
  };
  /// The same small tensors of one type and device, time and again.
  struct Row {
    std::vector<Pair> members;
    at::Tensor before;   // side by side
    at::Tensor differs;  // for each number
  };
  void compare(std::vector<Pair> members);

  std::vector<Pair> pending_;
  std::set<size_t> names_;  // of those
  std::vector<Row> rows_;
  std::map<size_t, at::Tensor> alone_;  // 0-dimensional, bool
};

}  // namespace infinitybatch
