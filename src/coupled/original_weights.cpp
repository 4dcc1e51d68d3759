#include "coupled/original_weights.hpp"

#include "core/torch_compat.hpp"

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>

namespace infinitybatch::coupled {

void OriginalWeights::note(const at::Tensor& parameter) {
  OriginalWeights* const innermost = ThreadContext::get().original_weights;
  if (innermost == nullptr) return;
  auto& entries = innermost->entries_;
  const bool known = std::any_of(entries.begin(), entries.end(), [&](const Entry& entry) {
    return entry.parameter.is_same(parameter);
  });
  if (known) return;
  const at::NoGradGuard no_grad;
  const auto version = parameter.is_inference() ? 0U : static_cast<uint32_t>(parameter._version());
  entries.push_back({parameter, parameter.variable_data().clone(), version});
}

void OriginalWeights::restore() const {
  const at::NoGradGuard no_grad;
  for (const Entry& entry : entries_) {
    entry.parameter.variable_data().copy_(entry.before);
    if (!entry.parameter.is_inference()) compat::set_version(entry.parameter, entry.version);
  }
}

}  // namespace infinitybatch::coupled
