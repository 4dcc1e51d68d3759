// Pytrees as Batches and back.
#include "python_batch.hpp"

#include "marked.hpp"
#include "tree_module.hpp"

#include <infinitybatch/core/errors.hpp>

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace infinitybatch::python {
namespace {

using StructurePtr = std::shared_ptr<const Structure>;

/// infinitybatch._tree: what only torch.utils._pytree knows.
bool has_only_str_keys(PyObject* dict) {
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t position = 0;
  while (PyDict_Next(dict, &position, &key, &value) != 0) {
    if (PyUnicode_CheckExact(key) == 0) return false;
  }
  return true;
}

/// Reads what needs no help from Python. Gives up at the first registered class.
class Reader {
 public:
  Reader(Side side, std::vector<Leaf>& leaves) : side_(side), leaves_(leaves) {}

  /// Null where a registered class was met.
  /// \param batch_dim as its owner has marked it
  StructurePtr read(py::handle value, std::optional<int64_t> batch_dim) {
    PyObject* object = value.ptr();
    if (THPVariable_Check(object)) {
      add(THPVariable_Unpack(object), batch_dim);
      return Structure::leaf();
    }
    if (PyTuple_CheckExact(object) || PyList_CheckExact(object)) return read_row(value, batch_dim);
    if (PyDict_CheckExact(object) && has_only_str_keys(object)) return read_dict(value, batch_dim);
    if (side_ != Side::returned && Marked::check(value)) {
      const auto& marked = value.cast<const Marked&>();
      return read(marked.value, marked.dim);
    }
    if (!is_plain_value(value)) {
      if (PyDict_CheckExact(object) || tree_module().attr("is_node")(value).cast<bool>()) {
        return nullptr;
      }
      if (side_ != Side::returned) {
        const py::object array = tree_module().attr("as_tensor")(value);
        if (!array.is_none()) {
          add(THPVariable_Unpack(array.ptr()), batch_dim);
          return Structure::leaf();
        }
      }
    }
    Leaf leaf;
    leaf.object = Held(py::reinterpret_borrow<py::object>(value));
    leaf.batch_dim = Leaf::kShared;
    leaves_.push_back(std::move(leaf));
    return Structure::leaf();
  }

 private:
  void add(at::Tensor tensor, std::optional<int64_t> batch_dim) {
    Leaf leaf;
    leaf.tensor = std::move(tensor);
    leaf.batch_dim = batch_dim.value_or(0);
    leaf.marked = batch_dim.has_value();
    leaves_.push_back(std::move(leaf));
  }

  StructurePtr read_row(py::handle value, std::optional<int64_t> batch_dim) {
    const bool tuple = PyTuple_CheckExact(value.ptr());
    std::vector<StructurePtr> children;
    for (const py::handle child : py::reinterpret_borrow<py::sequence>(value)) {
      children.push_back(read(child, batch_dim));
      if (!children.back()) return nullptr;
    }
    return tuple ? Structure::tuple(std::move(children)) : Structure::list(std::move(children));
  }

  StructurePtr read_dict(py::handle value, std::optional<int64_t> batch_dim) {
    std::vector<std::string> keys;
    std::vector<StructurePtr> children;
    for (const auto& [key, child] : py::reinterpret_borrow<py::dict>(value)) {
      keys.push_back(key.cast<std::string>());
      children.push_back(read(child, batch_dim));
      if (!children.back()) return nullptr;
    }
    return Structure::dict(std::move(keys), std::move(children));
  }

  Side side_;
  std::vector<Leaf>& leaves_;
};

Batch read_foreign(py::handle value, Side side) {
  const py::tuple read = tree_module().attr("flatten")(value);  // leaves, dims, names, spec
  std::vector<Leaf> leaves;
  Reader reader(side, leaves);
  const py::list values = read[0];
  const auto dims = read[1].cast<std::vector<std::optional<int64_t>>>();
  for (size_t i = 0; i < dims.size(); ++i) {
    const py::object leaf = values[i];
    // A leaf of the tree is one leaf of the batch: a node here would be torch's contradiction.
    reader.read(leaf, dims[i]);
  }
  return {std::move(leaves), Structure::foreign(Held(read[3].cast<py::object>()),
                                                read[2].cast<std::vector<std::string>>())};
}

void check_given(const Batch& batch, Side side, const char* name) {
  for (size_t i = 0; i < batch.leaves().size(); ++i) {
    const at::Tensor& tensor = batch.leaves()[i].tensor;
    if (!tensor.defined()) continue;
    const auto refuse = [&](const char* why) {
      throw Unsupported(name + batch.structure()->leaf_name(i) + why);
    };
    if (tensor.is_nested()) {
      refuse(" is a nested tensor, which has no rows to slice; pad it, or pass a BatchSource");
    }
    if (tensor.unsafeGetTensorImpl()->is_python_dispatch()) {
      refuse(
          " is a tensor subclass that answers ops itself (DTensor, a wrapper): its rows may be "
          "another rank's; pass plain tensors, say those of to_local()");
    }
    if (tensor.layout() != at::kStrided) {
      refuse(
          " is a sparse tensor, whose rows are no views; pass a BatchSource that makes the rows");
    }
    if (tensor.is_inference() && at::GradMode::is_enabled()) {
      refuse(" was made in inference mode and cannot take part in autograd; clone it outside");
    }
    if (side == Side::given && tensor.requires_grad() && !tensor.is_leaf()) {
      refuse(
          " was computed from something that requires grad, and that graph can run backward only "
          "once; detach it, or make what computed it a part of the model");
    }
  }
}

py::object leaf_to_python(const Leaf& leaf) {
  if (leaf.tensor.defined())
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(leaf.tensor));
  return py::reinterpret_borrow<py::object>(std::any_cast<const Held&>(leaf.object).handle());
}

/// Consumes leaves from `next` on.
py::object rebuild(const Structure& structure, const std::vector<Leaf>& leaves, size_t& next) {
  const auto& children = structure.children();
  switch (structure.kind()) {
    case Structure::Kind::leaf:
      return leaf_to_python(leaves.at(next++));
    case Structure::Kind::tuple: {
      py::tuple tuple(children.size());
      for (size_t i = 0; i < children.size(); ++i) tuple[i] = rebuild(*children[i], leaves, next);
      return tuple;
    }
    case Structure::Kind::list: {
      py::list list(children.size());
      for (size_t i = 0; i < children.size(); ++i) list[i] = rebuild(*children[i], leaves, next);
      return list;
    }
    case Structure::Kind::dict: {
      py::dict dict;
      for (size_t i = 0; i < children.size(); ++i) {
        dict[py::str(structure.keys()[i])] = rebuild(*children[i], leaves, next);
      }
      return dict;
    }
    case Structure::Kind::foreign: {
      py::list values(structure.leaf_count());
      for (size_t i = 0; i < structure.leaf_count(); ++i)
        values[i] = leaf_to_python(leaves.at(next++));
      const py::handle spec = std::any_cast<const Held&>(structure.tree()).handle();
      return tree_module().attr("unflatten")(values, spec);
    }
  }
  throw InvalidArgument("a batch of an unknown structure");
}

}  // namespace

bool is_plain_value(py::handle value) {
  PyObject* object = value.ptr();
  return object == Py_None || PyBool_Check(object) || PyLong_CheckExact(object) ||
         PyFloat_CheckExact(object) || PyUnicode_CheckExact(object) || PyBytes_CheckExact(object);
}

Batch to_batch(py::handle value, Side side, const char* name) {
  std::vector<Leaf> leaves;
  StructurePtr structure = Reader(side, leaves).read(value, std::nullopt);
  Batch batch =
      structure ? Batch(std::move(leaves), std::move(structure)) : read_foreign(value, side);
  if (side != Side::returned) check_given(batch, side, name);
  return batch;
}

py::object to_python(const Batch& batch) {
  size_t next = 0;
  return rebuild(*batch.structure(), batch.leaves(), next);
}

py::object call_model(py::handle model, const Batch& inputs) {
  const py::object arguments = to_python(inputs);
  PyObject* result = nullptr;
  if (inputs.is_tensor()) {
    result = PyObject_CallOneArg(model.ptr(), arguments.ptr());
  } else if (PyTuple_CheckExact(arguments.ptr())) {
    result = PyObject_CallObject(model.ptr(), arguments.ptr());
  } else if (PyList_CheckExact(arguments.ptr())) {
    result = PyObject_CallObject(model.ptr(), py::tuple(arguments).ptr());
  } else if (PyDict_Check(arguments.ptr())) {
    // A subclass of dict (a Hugging Face ModelOutput) would not be unpacked by `**` as it is here.
    result = PyObject_Call(model.ptr(), py::tuple().ptr(), py::dict(arguments).ptr());
  } else {
    result = PyObject_CallOneArg(model.ptr(), arguments.ptr());
  }
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

}  // namespace infinitybatch::python
