#pragma once

#include <ATen/core/TensorBody.h>

namespace infinitybatch::coupled {

/// A copy of values that are about to be overwritten by an op that nobody can hold back. Where
/// there is no room for one the step fails, but what it puts back then has to be somewhere.
/// \param copy the copy, in any case: in memory that no limit on tensors counts where it must
/// \throws what the ordinary copy threw
void copy_before_write(const at::Tensor& tensor, at::Tensor& copy);

}  // namespace infinitybatch::coupled
