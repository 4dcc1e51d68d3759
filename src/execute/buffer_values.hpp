#pragma once

#include <infinitybatch/core/model.hpp>

#include <ATen/core/TensorBody.h>

#include <vector>

namespace infinitybatch {

/// The buffer is this tensor again and has these values, whatever its kind; its version stays. No
/// tensor, or one without values, which others restore, stands as it is.
void restore_buffer(const BufferSlot& slot, const at::Tensor& tensor, const at::Tensor& values);

/// What all buffers hold at one moment: their tensors with their values, or nothing, where forward
/// is yet to put a tensor there (`register_buffer("mean", None)`). Restoring raises no version:
/// graphs that read the buffers stay valid, for they find the same values.
class BufferValues {
 public:
  explicit BufferValues(const std::vector<BufferSlot>& slots);
  /// The same of a parameter that forward writes, or gives other memory.
  /// \param memory where it lay
  /// \param values that it had there; undefined where nobody writes them
  void add(const at::Tensor& parameter, const at::Tensor& memory, const at::Tensor& values);
  /// Of these parameters, what they hold now.
  void add_parameters_of(const BufferValues& others);
  bool has_parameter(const at::Tensor& tensor) const;
  void restore() const;
  /// Tensors that lay there, each once.
  std::vector<at::Tensor> tensors() const;

 private:
  struct Entry {
    BufferSlot slot;
    at::Tensor tensor;  // undefined where there was none
    at::Tensor values;  // undefined too where an earlier entry holds the same tensor
  };
  struct Parameter {
    at::Tensor parameter, memory, values;
  };
  std::vector<Entry> entries_;
  std::vector<Parameter> parameters_;
};

}  // namespace infinitybatch
