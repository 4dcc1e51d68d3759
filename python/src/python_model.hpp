#pragma once

#include "held.hpp"

#include <infinitybatch/core/model.hpp>

namespace infinitybatch::python {

/// A Model of infinitybatch._model.ModelView, which knows torch.nn.Module.
/// \param forward      the view's `forward`
/// \param keep_outputs outputs will be joined, so that objects which nobody can join are refused
Model model_of(const Held& view, const Held& forward, bool keep_outputs);

}  // namespace infinitybatch::python
