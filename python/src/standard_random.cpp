// Python's global random state without getstate(), which makes 625 numbers of it in every step.
//
// CPython's random.Random is a C object: an index and 624 words behind the object's head. That this
// is so is checked against getstate() once in a process; elsewhere, and where threads may draw
// meanwhile because there is no GIL, getstate() is used. Putting back goes by setstate() always.
#include "standard_random.hpp"

#include "core/recycled.hpp"

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>

namespace infinitybatch::python {
namespace {

constexpr size_t kWords = 624;

/// As CPython's RandomObject goes on behind its head.
struct Twister {
  int index;
  std::array<uint32_t, kWords> words;
};

py::tuple words_of(const Twister& twister) {
  py::tuple words(kWords + 1);
  for (size_t i = 0; i < kWords; ++i) words[i] = py::int_(twister.words[i]);
  words[kWords] = py::int_(twister.index);
  return words;
}

bool is_laid_out_so(const Twister& twister, const py::object& random) {
  const py::tuple state = random.attr("getstate")();
  if (state.size() != 3) return false;
  const py::object version = state[0];
  const py::object words = state[1];
  return version.equal(py::int_(3)) && words.equal(words_of(twister));
}

/// Null where the generator is of another kind.
const Twister* find_twister(const py::object& random, const py::object& generator) {
#ifdef Py_GIL_DISABLED
  return nullptr;
#else
  // Kept for good: modules live as long as the process.
  static PyObject* kind = py::object(random.attr("Random")).release().ptr();
  if (reinterpret_cast<PyObject*>(Py_TYPE(generator.ptr())) != kind) return nullptr;
  constexpr size_t kHead = sizeof(PyObject);
  static const bool large_enough =
      static_cast<size_t>(Py_TYPE(generator.ptr())->tp_basicsize) >= kHead + sizeof(Twister);
  if (!large_enough) return nullptr;
  const auto* twister =
      reinterpret_cast<const Twister*>(reinterpret_cast<const char*>(generator.ptr()) + kHead);
  static const bool laid_out_so = is_laid_out_so(*twister, random);
  return laid_out_so ? twister : nullptr;
#endif
}

std::function<void()> save_by_getstate(const py::object& random) {
  const Held state(random.attr("getstate")());
  const Held restore(random.attr("setstate"));
  return [state, restore] { restore.handle()(state.handle()); };
}

}  // namespace

std::function<void()> save_standard_random(const py::object& random) {
  const py::object getstate = random.attr("getstate");
  if (!PyMethod_Check(getstate.ptr())) return save_by_getstate(random);
  const auto generator = py::reinterpret_borrow<py::object>(PyMethod_GET_SELF(getstate.ptr()));
  const Twister* twister = find_twister(random, generator);
  if (twister == nullptr) return save_by_getstate(random);
  const auto before = recycled(*twister);
  const Held held(generator);
  // The second of two normal numbers, where it waits to be drawn.
  const Held gauss(generator.attr("gauss_next"));
  return [held, before, gauss] {
    held.handle().attr("setstate")(py::make_tuple(py::int_(3), words_of(*before), gauss.handle()));
  };
}

}  // namespace infinitybatch::python
