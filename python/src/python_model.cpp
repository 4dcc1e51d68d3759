#include "python_model.hpp"

#include "core/out_of_memory.hpp"
#include "core/sample_dims.hpp"
#include "core/squeezed.hpp"
#include "core/thread_context.hpp"
#include "coupled/part_of_batch.hpp"
#include "execute/carried_state.hpp"
#include "module_attributes.hpp"
#include "module_walk.hpp"
#include "python_batch.hpp"

#include <infinitybatch/core/errors.hpp>

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace infinitybatch::python {
namespace {

/// A buffer of a TorchScript module, which keeps no Python dict.
BufferSlot attribute_slot(std::string name, const Held& module, const Held& key) {
  return {std::move(name),
          [module, key] {
            const py::gil_scoped_acquire gil;
            const py::error_scope keep_error;
            return tensor_or_nothing(py::getattr(module.handle(), key.handle()).ptr());
          },
          [module, key](const at::Tensor& tensor) {
            const py::gil_scoped_acquire gil;
            const py::error_scope keep_error;
            py::setattr(module.handle(), key.handle(), py::cast(tensor));
          }};
}

/// An object of an unregistered class may hold tensors, and with them a graph, that nobody could
/// detach or join.
void check_can_be_kept(const Batch& outputs) {
  for (size_t i = 0; i < outputs.leaves().size(); ++i) {
    const Leaf& leaf = outputs.leaves()[i];
    if (leaf.tensor.defined()) continue;
    const py::handle object = std::any_cast<const Held&>(leaf.object).handle();
    if (is_plain_value(object)) continue;
    const std::string type = Py_TYPE(object.ptr())->tp_name;
    if (type.ends_with("Cache")) {  // of Hugging Face's decoders, which make one by default
      throw InvalidType("outputs" + outputs.structure()->leaf_name(i) + " is a " + type +
                        ", which cannot be joined over micro-batches and which training does not "
                        "need: call the model with use_cache=False, or set "
                        "model.config.use_cache = False");
    }
    throw InvalidType("outputs" + outputs.structure()->leaf_name(i) + " is a " + type +
                      ", which cannot be joined over micro-batches: register the class with "
                      "torch.utils._pytree, return its tensors, or give a micro_batch_size as "
                      "large as the batch; where keep_outputs asks for it use on_micro_batch");
  }
}

/// What a loss of the whole batch reads, it reads in tensors: an object that holds them all would
/// be the first micro-batch's.
bool hides_tensors(const Batch& outputs) {
  return coupled::PartOfBatch::at_work() && outputs.tensors().empty();
}

Batch finished(const py::object& given, Outputs use) {
  Batch outputs = to_batch(given, Side::returned, "outputs");
  if (use == Outputs::kept && ThreadContext::get().sees_all) return outputs;
  if (use == Outputs::kept || (use == Outputs::for_one_loss && hides_tensors(outputs))) {
    check_can_be_kept(outputs);
  }
  return outputs;
}

PlainLook look_at(const Held& view) {
  return {[view] {
            const py::gil_scoped_acquire gil;
            return plain_state(view.handle().attr("forward"));
          },
          [view] {
            const py::gil_scoped_acquire gil;
            return plain_tensors(view.handle().attr("forward"));
          }};
}

std::string first_line(const py::error_already_set& error) {
  const auto text = py::str(error.value()).cast<std::string>();
  return text.substr(0, text.find('\n'));
}

/// A CouplingError that an op of this library raised inside of forward (`across_batch`), as the
/// step answers it: it went through Python.
void check_coupling(const py::error_already_set& error) {
  if (!coupled::PartOfBatch::at_work()) return;
  if (!error.matches(py::module_::import("infinitybatch.errors").attr("CouplingError"))) return;
  throw CouplingError(error.value().attr("op").cast<std::string>(),
                      py::str(error.value()).cast<std::string>());
}

/// As torch's layers complain of too few rows, which the whole batch may not be.
void check_rows(const py::error_already_set& error) {
  if (!coupled::PartOfBatch::at_work()) return;
  if (!error.matches(PyExc_ValueError) && !error.matches(PyExc_RuntimeError)) return;
  const std::string text = first_line(error);
  if (!text.starts_with("Expected more than 1 value per channel when training") &&
      !text.starts_with("input tensor must have at least one element")) {
    return;
  }
  throw CouplingError(
      "aten::batch_norm",
      "a layer that normalises over samples in training mode was given too few rows of a "
      "micro-batch (" +
          text +
          "): it sees rows that forward selects by their values, or less than one for each sample. "
          "Normalise all rows and select afterwards, put the layer into eval mode, or make the "
          "budget, or micro_batch_size, large enough for one micro-batch of all samples");
}

/// Whether forward's own code failed on a part of the batch.
bool failed_on_a_part(const py::error_already_set& error) {
  if (!coupled::PartOfBatch::at_work()) return false;
  if (error.matches(py::module_::import("infinitybatch.errors").attr("Error"))) return false;
  if (is_out_of_memory(std::current_exception())) return false;
  return error.matches(PyExc_RuntimeError) || error.matches(PyExc_ValueError) ||
         error.matches(PyExc_LookupError) || error.matches(PyExc_AssertionError) ||
         error.matches(PyExc_ArithmeticError);
}

/// An adjacency matrix has the samples along two dimensions, of which one alone can be split.
void check_square_inputs(const py::error_already_set& error, const Batch& inputs) {
  const auto [rows, total, native_draws] = *coupled::PartOfBatch::at_work();
  for (size_t i = 0; i < inputs.leaves().size(); ++i) {
    const Leaf& leaf = inputs.leaves()[i];
    if (!leaf.tensor.defined() || leaf.batch_dim == Leaf::kShared) continue;
    for (int64_t dim = 0; dim < leaf.tensor.dim(); ++dim) {
      if (dim == leaf.batch_dim || leaf.tensor.size(dim) != total) continue;
      throw BatchError(
          "inputs" + inputs.structure()->leaf_name(i) + " has two dimensions of " +
          std::to_string(total) +
          ", the size of the batch, and forward fails on a micro-batch of " + std::to_string(rows) +
          " (" + first_line(error) +
          "). If its samples are nodes that see each other (an adjacency matrix), they cannot be "
          "split: give whole graphs as samples, [graphs, nodes, ...], or run this model as it is. "
          "What every sample needs whole (positions, a mask) is marked, ib.shared(x)");
    }
  }
}

/// The exception stays the user's own; Python shows the note below it.
void add_note(const py::error_already_set& error, const Batch& inputs) {
  const auto& part = *coupled::PartOfBatch::at_work();
  error.value().attr("add_note")(
      "infinitybatch: forward ran on a micro-batch of " + std::to_string(part.rows) + " of the " +
      std::to_string(part.total) + " samples." + marks_that_fit(inputs, "inputs", part.total) +
      " If it fails on those alone, compute all at once: micro_batch_size=" +
      std::to_string(part.total) +
      (part.rows == 1 ? std::string(". Where it calls squeeze(): ") + kSqueezed : ""));
}

/// As torch complains of shapes that do not fit; running out of memory is no such complaint.
bool is_of_shape(const py::error_already_set& error) {
  if (!error.matches(PyExc_RuntimeError)) return false;
  return !is_out_of_memory(std::current_exception());
}

/// Asked for each micro-batch.
bool is_uncompiled(const Held& view) {
  static PyObject* const name = interned("is_uncompiled");
  return owned(PyObject_GetAttr(view.get(), name)).cast<bool>();
}

}  // namespace

Model model_of(const Held& view, const Held& forward, Outputs use, bool is_static) {
  Model model;
  model.forward = [view, forward, use](const Batch& inputs) {
    const py::gil_scoped_acquire gil;
    py::object callable = py::reinterpret_borrow<py::object>(forward.handle());
    if (coupled::PartOfBatch::of_one()) callable = view.handle().attr("one_of_many")(callable);
    if (is_uncompiled(view)) {
      callable = view.handle().attr("uncompiled")(callable);
    }
    CarriedState* carried = CarriedState::at_work();
    if (carried != nullptr) carried->before_forward(look_at(view));
    py::object given;
    try {
      given = call_model(callable, inputs);
    } catch (py::error_already_set& error) {
      check_coupling(error);
      check_rows(error);
      if (carried != nullptr && is_of_shape(error)) carried->forward_failed(first_line(error));
      if (failed_on_a_part(error)) {
        check_square_inputs(error, inputs);
        add_note(error, inputs);
      }
      throw;
    }
    if (carried != nullptr) carried->after_forward();
    return finished(given, use);
  };
  // What is found beside the parameters, for which C++ asks first, until it asks for that too.
  const auto beside = std::make_shared<std::optional<std::vector<BufferSlot>>>();
  model.parameters = [view, forward, beside] {
    const py::gil_scoped_acquire gil;
    beside->reset();
    if (std::optional<Owned> owned = walk_ordinary(forward.handle())) {
      *beside = std::move(owned->buffers);
      return std::move(owned->parameters);
    }
    std::vector<NamedParameter> parameters;
    for (const py::handle item : view.handle().attr("parameters")()) {
      const auto pair = item.cast<py::tuple>();
      parameters.push_back({pair[0].cast<std::string>(), pair[1].cast<at::Tensor>()});
    }
    return parameters;
  };
  model.buffers = [view, beside] {
    const py::gil_scoped_acquire gil;
    std::vector<BufferSlot> slots;
    if (beside->has_value()) {
      slots = std::move(**beside);
      beside->reset();
      return slots;
    }
    for (const py::handle item : view.handle().attr("buffers")()) {
      const auto triple = item.cast<py::tuple>();
      const Held owner(triple[1].cast<py::object>());
      const Held key(triple[2].cast<py::object>());
      slots.push_back(PyDict_Check(owner.get())
                          ? dict_slot(triple[0].cast<std::string>(), owner, key)
                          : attribute_slot(triple[0].cast<std::string>(), owner, key));
    }
    return slots;
  };
  model.is_training = [view] {
    const py::gil_scoped_acquire gil;
    return view.handle().attr("is_training")().cast<bool>();
  };
  model.configuration = [view, is_static] {
    const py::gil_scoped_acquire gil;
    return configuration_of(view.handle().attr("forward"), /*nested=*/is_static);
  };
  return model;
}

}  // namespace infinitybatch::python
