#include "object_serials.hpp"

#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <cstddef>

namespace infinitybatch::python {
namespace {

struct Entry {
  PyObject* reference;  // weak, and ours
  uint64_t serial;
};

bool refers_to(PyObject* reference, PyObject* object) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* found = nullptr;
  if (PyWeakref_GetRef(reference, &found) < 0) PyErr_Clear();
  Py_XDECREF(found);
  return found == object;
#else
  return PyWeakref_GetObject(reference) == object;
#endif
}

/// Never destroyed: the interpreter may be gone by then.
class Serials {
 public:
  std::optional<uint64_t> of(PyObject* object) {
    const auto known = entries_.find(object);
    if (known != entries_.end() && refers_to(known->second.reference, object)) {
      return known->second.serial;
    }
    if (entries_.size() >= most_) forget_dead();
    PyObject* const reference = PyWeakref_NewRef(object, nullptr);
    if (reference == nullptr) {
      PyErr_Clear();
      return std::nullopt;
    }
    const auto [place, anew] = entries_.emplace(object, Entry{reference, next_});
    if (!anew) {
      Py_DECREF(place->second.reference);
      place->second = {reference, next_};
    }
    return next_++;
  }

 private:
  static constexpr size_t kFewest = size_t{1} << 14;

  void forget_dead() {
    for (auto entry = entries_.begin(); entry != entries_.end();) {
      if (refers_to(entry->second.reference, entry->first)) {
        ++entry;
        continue;
      }
      Py_DECREF(entry->second.reference);
      entry = entries_.erase(entry);
    }
    most_ = std::max(kFewest, 2 * entries_.size());
  }

  ska::flat_hash_map<PyObject*, Entry> entries_;
  size_t most_ = kFewest;
  uint64_t next_ = 1;
};

}  // namespace

std::optional<uint64_t> serial_of(PyObject* object) {
  static auto& serials = *new Serials;
  return serials.of(object);
}

}  // namespace infinitybatch::python
