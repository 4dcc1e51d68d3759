#include "loss/one_number.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/core/Tensor.h>

#include <sstream>

namespace infinitybatch {

at::Tensor one_number(const at::Tensor& value, const std::string& what) {
  if (!value.defined())
    throw InvalidArgument(what + " returned no tensor; it must return a scalar tensor");
  if (value.is_complex()) {
    throw InvalidArgument(what +
                          " returned a complex tensor; backward needs a real number, such as "
                          "value.abs() or value.real");
  }
  if (value.numel() != 1) {
    std::ostringstream message;
    message << what << " returned a tensor of shape " << value.sizes()
            << "; it must return a scalar tensor: reduce it with .mean() or .sum(), or leave out "
               "reduction=\"none\"";
    throw InvalidArgument(message.str());
  }
  return value.dim() == 0 ? value : value.reshape({});
}

}  // namespace infinitybatch
