#pragma once

#include <ATen/core/TensorBody.h>

namespace infinitybatch {

/// Whether elements of it lie in one place (`expand`), so that no operator writes into it.
bool has_repeats(const at::Tensor& tensor);

/// A copy of a tensor of any kind, without a history, that nobody else writes into. Of an expanded
/// one each element is copied once, and the copy is expanded.
at::Tensor value_of(const at::Tensor& tensor);

/// Makes the values of `tensor`, of any kind, those of `values`, of the same kind: written into its
/// memory where they fit there, in other memory otherwise. Raises no version: graphs that read them
/// stay valid.
/// \returns whether it could: not with a subclass that does not tell what it wraps, for which the
///          caller puts another object into its place
[[nodiscard]] bool put_back(const at::Tensor& tensor, const at::Tensor& values);

/// The same where the tensor may have been given other memory: `memory`, an alias from before, has
/// the values again. One that is no memory seen by strides gets other parts from operators, and
/// has them itself.
void put_back(const at::Tensor& memory, const at::Tensor& tensor, const at::Tensor& values);

/// The first, as an operator that writes into `tensor`: raises its version.
bool put_back_counted(const at::Tensor& tensor, const at::Tensor& values);

/// Whether `any_bit_differs` can tell of two like this one.
bool can_be_compared(const at::Tensor& tensor);

}  // namespace infinitybatch
