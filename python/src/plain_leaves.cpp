#include "plain_leaves.hpp"
#include "core/plain_leaves.hpp"

#include "held.hpp"
#include "module_walk.hpp"
#include "python_batch.hpp"
#include "tree_module.hpp"

#include <string>

namespace infinitybatch::python {
namespace {

py::handle held_in(const std::any& value) {
  const auto* held = std::any_cast<Held>(&value);
  return held == nullptr || !*held ? py::handle(Py_None) : held->handle();
}

bool alike(const std::any& left, const std::any& right) {
  const py::gil_scoped_acquire gil;
  if (held_in(left).is(held_in(right))) return true;
  return tree_module().attr("alike")(held_in(left), held_in(right)).cast<bool>();
}

bool is_number(const std::any& value) {
  const py::gil_scoped_acquire gil;
  PyObject* object = held_in(value).ptr();
  if (object == Py_None || PyBool_Check(object) || PyUnicode_CheckExact(object)) return false;
  return tree_module().attr("is_number")(held_in(value)).cast<bool>();
}

std::string text(const std::any& value) {
  constexpr size_t kLongest = 60;
  const py::gil_scoped_acquire gil;
  auto text = py::repr(held_in(value)).cast<std::string>();
  return text.size() <= kLongest ? text : text.substr(0, kLongest) + "...";
}

std::string identity(const std::any& value) {
  const py::gil_scoped_acquire gil;
  const py::handle object = held_in(value);
  const std::string type = Py_TYPE(object.ptr())->tp_name;
  if (is_plain_value(object)) return type + py::repr(object).cast<std::string>();
  return type + std::to_string(settings_of(object));
}

}  // namespace

void register_plain_leaves() {
  know_plain_leaves({&alike, &is_number, &text, &identity});
}

}  // namespace infinitybatch::python
