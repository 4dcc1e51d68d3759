#pragma once

#include <infinitybatch/core/batch.hpp>

#include <ATen/core/TensorBody.h>

namespace infinitybatch {

/// Same shape, type and device.
bool same_form(const at::Tensor& a, const at::Tensor& b);

/// Resizes `tensor`, in its own memory if that is enough, to the shape of `like`: a forward may
/// have resized it in place (an observer of quantization that sees its first batch).
void resize_to(const at::Tensor& tensor, const at::Tensor& like);

/// Whether any bit differs between two tensors of the same form, of any kind, as a 0-dimensional
/// bool tensor on their device: nothing waits for the device, and NaN equals NaN. Where nobody can
/// tell (`can_be_compared`) they differ.
at::Tensor any_bit_differs(const at::Tensor& a, const at::Tensor& b);

/// Sets `differs`, a 0-dimensional bool tensor on `before`'s device, where `now` has other bits or
/// another form. Makes it where it is undefined. Nothing waits for the device.
void note_difference(const at::Tensor& before, const at::Tensor& now, at::Tensor& differs);

/// Sets `differs`, where a strided tensor of `before` has other bits, or another form, in `now`. On
/// accelerators what kernels with atomics explain is no difference. Nothing waits for the device.
void note_differences(const Batch& before, const Batch& now, at::Tensor& differs);

}  // namespace infinitybatch
