#pragma once

#include <ATen/core/TensorBody.h>

#include <string>

namespace infinitybatch {

/// One number, 0-dimensional; native takes any shape of one element for a loss, so we do too.
/// \throws InvalidArgument naming `what` where it is none
at::Tensor one_number(const at::Tensor& value, const std::string& what);

}  // namespace infinitybatch
