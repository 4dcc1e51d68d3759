#pragma once

#include "held.hpp"

#include <infinitybatch/core/model.hpp>

namespace infinitybatch::python {

/// A Model of infinitybatch._model.ModelView, which knows torch.nn.Module.
/// \param forward the view's `forward`
Model model_of(const Held& view, const Held& forward);

}  // namespace infinitybatch::python
