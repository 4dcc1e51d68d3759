#pragma once

#include "held.hpp"

#include <infinitybatch/core/model.hpp>

namespace infinitybatch::python {

/// What becomes of a model's outputs.
enum class Outputs {
  read_by_parts,  ///< each micro-batch's own loss reads them
  for_one_loss,   ///< a loss of the whole batch reads them, so that they have to show tensors
  kept,           ///< they are joined, so that objects which nobody can join are refused
};

/// A Model of infinitybatch._model.ModelView, which knows torch.nn.Module.
/// \param forward   the view's `forward`
/// \param is_static `static_graph`: between looks nothing but its settings tells of another
/// program,
///                  so that nested ones count, too
Model model_of(const Held& view, const Held& forward, Outputs use, bool is_static);

}  // namespace infinitybatch::python
