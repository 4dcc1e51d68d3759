#include "module_attributes.hpp"
#include "plain_iterators.hpp"
#include "plain_snapshot.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace infinitybatch::python {
namespace {

void set_item(PyObject* owner, PyObject* key, PyObject* value) {
  raise_if(PyObject_SetItem(owner, key, value));
}

void set_cell(PyObject* cell, PyObject* /*key*/, PyObject* value) {
  raise_if(PyCell_Set(cell, value));
}

}  // namespace

void PlainSnapshot::iterator(PyObject* value, const std::string& name, bool in_tuple) {
  const bool anew = meet(value);
  // Two that read from one: a copy of either would not move with the other.
  const auto share = [&](PyObject* read) {
    for (Iterator& each : iterators_) {
      const bool reads = std::any_of(each.reads.begin(), each.reads.end(),
                                     [&](const Held& one) { return one.get() == read; });
      if (reads || each.now.get() == read) each.before = Held();
    }
  };
  if (!anew) {
    const bool known = std::any_of(iterators_.begin(), iterators_.end(),
                                   [&](const Iterator& each) { return each.now.get() == value; });
    if (in_tuple || !known) share(value);
    return;
  }
  Iterator found;
  found.now = Held(py::reinterpret_borrow<py::object>(value));
  found.place = place_of(value);
  found.name = name;
  std::vector<py::object> reads;
  py::object copy = copy_of_iterator(value, reads);
  bool alone = copy && !in_tuple;
  for (py::object& read : reads) {
    if (!meet(read.ptr())) {
      share(read.ptr());
      alone = false;
    }
    found.reads.emplace_back(std::move(read));
  }
  if (alone) found.before = Held(std::move(copy));
  iterators_.push_back(std::move(found));
}

/// No copy can take a place in a tuple.
void PlainSnapshot::iterators_in_tuple(PyObject* tuple, const std::string& name) {
  constexpr Py_ssize_t kMost = 1024;
  for (Py_ssize_t i = 0; i < std::min(PyTuple_GET_SIZE(tuple), kMost); ++i) {
    PyObject* item = PyTuple_GET_ITEM(tuple, i);
    if (is_iterator(item)) iterator(item, name + "[" + std::to_string(i) + "]", /*in_tuple=*/true);
  }
}

std::vector<PlainSnapshot::Holder> PlainSnapshot::holders_of(const Iterator& each) const {
  PyObject* const iterator = each.now.get();
  std::vector<Holder> holders;
  const auto add = [&](const Entry& entry, py::object key, PyObject* value, auto* set) {
    holders.push_back({Held(py::reinterpret_borrow<py::object>(entry.now)),
                       key ? Held(std::move(key)) : Held(), value, set});
  };
  for (const Entry& entry : entries_) {
    if (entry.kind == Kind::cell) {
      if (entry.before == iterator) add(entry, {}, PyCell_GET(entry.now), &set_cell);
    } else if (entry.kind == Kind::list) {
      const Py_ssize_t size = std::min(PyList_GET_SIZE(entry.now), PyTuple_GET_SIZE(entry.before));
      for (Py_ssize_t i = 0; i < size; ++i) {
        if (PyTuple_GET_ITEM(entry.before, i) != iterator) continue;
        add(entry, py::int_(i), PyList_GET_ITEM(entry.now, i), &set_item);
      }
    } else if (entry.kind != Kind::other && !entry.names_only) {
      PyObject* key = nullptr;
      PyObject* value = nullptr;
      for (Py_ssize_t at = 0; PyDict_Next(entry.before, &at, &key, &value) != 0;) {
        if (value != iterator) continue;
        add(entry, py::reinterpret_borrow<py::object>(key), PyDict_GetItemWithError(entry.now, key),
            &set_item);
      }
    }
  }
  return holders;
}

bool PlainSnapshot::has_moved(const Iterator& each, std::string* place) const {
  PyObject* now = each.now.get();
  if (each.before) {
    const std::vector<Holder> holders = holders_of(each);
    if (!holders.empty()) now = holders.front().value;
  }
  if (now == nullptr || !is_iterator(now)) return false;  // another object, as dicts and lists tell
  std::string here = place_of(now);
  const bool moved = here != each.place;
  if (place != nullptr) *place = std::move(here);
  return moved;
}

void PlainSnapshot::hand_in(const std::vector<Holder>& holders, PyObject* before) {
  std::vector<py::object> read;
  const py::object copy = copy_of_iterator(before, read);
  if (!copy) return;
  for (const Holder& each : holders) each.set(each.owner.get(), each.key.get(), copy.ptr());
}

void PlainSnapshot::put_back_iterators() const {
  for (const Iterator& each : iterators_) {
    if (each.before && has_moved(each)) hand_in(holders_of(each), each.before.get());
  }
}

/// As counters: one place natively, and once for each logical batch.
void PlainSnapshot::add_moved_iterators(std::vector<PlainNumber>& found) const {
  for (const Iterator& each : iterators_) {
    PlainNumber number;
    if (!has_moved(each, &number.left)) continue;
    number.name = each.name;
    number.by = NAN;  // nobody can tell how far
    if (std::vector<Holder> holders = holders_of(each); each.before && !holders.empty()) {
      std::vector<py::object> reads;
      if (py::object copy = copy_of_iterator(holders.front().value, reads)) {
        number.put_in = [holders, now = Held(std::move(copy))] {
          const py::gil_scoped_acquire gil;
          const py::error_scope keep_error;
          hand_in(holders, now.get());
        };
      }
      number.put_back = [holders = std::move(holders), before = each.before] {
        const py::gil_scoped_acquire gil;
        const py::error_scope keep_error;
        hand_in(holders, before.get());
      };
    }
    found.push_back(std::move(number));
  }
}

}  // namespace infinitybatch::python
