#include "execute/found_values.hpp"

#include "core/batch_form.hpp"
#include "core/bits.hpp"

#include <ATen/Functions.h>

#include <cstddef>

namespace infinitybatch {
namespace {

/// A number that the program holds as a tensor.
bool same_number(const tape::External& a, const tape::External& b) {
  const auto is_number = [](const tape::External& external) {
    return external.input_leaf < 0 && !external.is_buffer && !external.before.defined() &&
           external.tensor.defined() && external.tensor.is_cpu() && external.tensor.dim() == 0 &&
           !external.tensor.requires_grad();
  };
  return a.value == b.value && is_number(a) && is_number(b) && a.version == b.version &&
         same_form(a.tensor, b.tensor) && !any_bit_differs(a.tensor, b.tensor).item<bool>();
}

}  // namespace

void FoundValues::share(tape::Tape& tape, const tape::Tape* first) {
  std::vector<tape::External>& externals = tape.externals.own();
  for (size_t i = 0; i < externals.size(); ++i) {
    tape::External& external = externals[i];
    if (first != nullptr && i < first->externals.size() &&
        same_number(external, first->externals[i])) {
      external = first->externals[i];
    }
    if (!external.is_buffer || !external.before.defined() || !external.tensor.defined()) continue;
    at::Tensor& known = buffers_[external.tensor.unsafeGetTensorImpl()];
    if (!known.defined()) known = external.before;
    external.before = known;
  }
}

}  // namespace infinitybatch
