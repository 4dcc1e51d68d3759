#pragma once

#include "held.hpp"

#include <infinitybatch/core/batch.hpp>

namespace infinitybatch::python {

/// What is being turned into a Batch.
enum class Side {
  given,  ///< inputs and targets: markers (`shared`, `batch_dim`) and NumPy arrays are understood
  differentiated,  ///< given, and gradients go on through the graph that a tensor has
  returned,        ///< what a model gave back: taken as it is
};

/// Any pytree as a Batch. Tensors, and tuples, lists and dicts (with str keys) of them, are read
/// here; every other registered pytree goes through torch.utils._pytree, whose TreeSpec becomes the
/// foreign structure. The caller holds the GIL, as for everything in this file.
/// \param name what the value is called in messages: "inputs"
/// \throws Unsupported for given tensors that cannot be split or differentiated
Batch to_batch(py::handle value, Side side, const char* name);

/// None, a number or text: nothing that could hold a tensor.
bool is_plain_value(py::handle value);

/// The pytree back.
py::object to_python(const Batch& batch);

/// Calls `model` as people do: model(x) for one tensor (or one object), model(*inputs) for a tuple
/// or list, model(**inputs) for a mapping; an object of any other registered class is passed whole.
py::object call_model(py::handle model, const Batch& inputs);

}  // namespace infinitybatch::python
