#include "coupled/plain_copy.hpp"

#include "core/foreign_exception.hpp"
#include "core/tensor_parts.hpp"
#include "core/tensor_values.hpp"
#include "core/unwatched.hpp"

#include <ATen/Functions.h>
#include <ATen/record_function.h>

#include <exception>
#include <memory>
#include <vector>

namespace infinitybatch::coupled {
namespace {

at::Tensor copy_in_plain_memory(const at::Tensor& tensor) {
  keep_foreign_exception(std::current_exception());
  const Unwatched unwatched;
  if (!is_plain(tensor)) return {};  // nobody could make it of such memory
  auto bytes =
      std::make_shared<std::vector<char>>(static_cast<size_t>(tensor.numel()) * tensor.itemsize());
  at::Tensor copy = at::from_blob(
      bytes->data(), tensor.sizes(), [bytes](void*) mutable { bytes.reset(); },
      tensor.options().device(at::kCPU));
  return copy.copy_(tensor);
}

}  // namespace

void copy_before_write(const at::Tensor& tensor, at::Tensor& copy) {
  const at::NoGradGuard no_grad;
  const at::RecordFunctionGuard unseen(false);  // no op of the model's
  try {
    copy = value_of(tensor);
  } catch (...) {
    copy = copy_in_plain_memory(tensor);
    throw;
  }
}

}  // namespace infinitybatch::coupled
