#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <vector>

namespace infinitybatch::python {

/// Generators, and the iterators of Python's builtins and of itertools. Others are objects like any
/// other (those written in Python), or nobody can see them move.
bool is_iterator(PyObject* value);

/// Where it stands: another text once it has moved. Nothing is taken from it.
std::string place_of(PyObject* iterator);

/// Another one that stands in the same place and moves alone. Null where Python cannot copy it: a
/// generator, or one that calls functions or reads such an iterator.
/// \param reads gets the iterators that it reads from
pybind11::object copy_of_iterator(PyObject* iterator, std::vector<pybind11::object>& reads);

}  // namespace infinitybatch::python
