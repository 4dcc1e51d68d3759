// NumPy's global random state without get_state(), which converts 624 numbers one by one.
//
// The state has two parts. MT19937's key and position lie at `bit_generator.ctypes.state_address`,
// a public attribute. Whether a second normal number is cached, and which, lies in the RandomState
// itself, at a place that is looked for once, in one of our own whose cached number is known. Where
// either is not as expected get_state() is used. Putting back goes by set_state() always.
#include "numpy_random.hpp"

#include "core/recycled.hpp"

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

namespace infinitybatch::python {
namespace {

constexpr size_t kNumpyWords = 624;

/// As NumPy's mt19937_state; `is_laid_out_so` compares it with get_state() once.
struct NumpyTwister {
  std::array<uint32_t, kNumpyWords> key;
  int32_t pos;
};

/// As NumPy's aug_bitgen_t; `place_of_normal` compares it with get_state() once.
struct NumpyNormal {
  const void* bit_generator;  // points into the RandomState, too
  int has_gauss;
  double gauss;
};

void restore_full(const Held& numpy_random, const py::object& state) {
  numpy_random.handle().attr("set_state")(state);
}

py::dict full_state(const NumpyTwister& twister, bool has_gauss, double gauss) {
  const py::module_ numpy = py::module_::import("numpy");
  const py::bytes bytes(reinterpret_cast<const char*>(twister.key.data()), 4 * kNumpyWords);
  py::dict inner;
  inner["key"] = numpy.attr("frombuffer")(bytes, numpy.attr("uint32"));
  inner["pos"] = twister.pos;
  py::dict state;
  state["bit_generator"] = "MT19937";
  state["state"] = inner;
  state["has_gauss"] = has_gauss ? 1 : 0;
  state["gauss"] = gauss;
  return state;
}

bool is_laid_out_so(const NumpyTwister& twister, const py::object& numpy_random) {
  const py::object inner = numpy_random.attr("get_state")(py::arg("legacy") = false)["state"];
  const auto key = inner["key"].attr("tobytes")().cast<std::string>();
  return key.size() == 4 * kNumpyWords &&
         std::memcmp(key.data(), twister.key.data(), 4 * kNumpyWords) == 0 &&
         inner["pos"].cast<int32_t>() == twister.pos;
}

const NumpyNormal& normal_in(PyObject* random_state, size_t place) {
  return *reinterpret_cast<const NumpyNormal*>(reinterpret_cast<const char*>(random_state) + place);
}

bool points_into(const void* pointer, PyObject* object) {
  const auto begin = reinterpret_cast<uintptr_t>(object);
  const auto here = reinterpret_cast<uintptr_t>(pointer);
  return begin <= here && here < begin + static_cast<size_t>(Py_TYPE(object)->tp_basicsize);
}

/// Where a RandomState keeps its NumpyNormal; nothing where that is not the one place that moves as
/// it should.
std::optional<size_t> place_of_normal(const py::object& random_state_class) {
  const py::object own = random_state_class(0);
  own.attr("standard_normal")();  // makes two, and keeps the second
  const auto kept = own.attr("get_state")(py::arg("legacy") = false)["gauss"].cast<double>();
  const auto size = static_cast<size_t>(Py_TYPE(own.ptr())->tp_basicsize);
  std::vector<size_t> places;
  for (size_t place = sizeof(PyObject); place + sizeof(NumpyNormal) <= size;
       place += alignof(NumpyNormal)) {
    const NumpyNormal& normal = normal_in(own.ptr(), place);
    if (points_into(normal.bit_generator, own.ptr()) && normal.has_gauss == 1 &&
        std::memcmp(&normal.gauss, &kept, sizeof(kept)) == 0) {
      places.push_back(place);
    }
  }
  own.attr("standard_normal")();  // takes it
  const bool found = places.size() == 1 && normal_in(own.ptr(), places.front()).has_gauss == 0;
  return found ? std::optional(places.front()) : std::nullopt;
}

/// What is asked in every step: looked up once for a generator.
struct Known {
  Held module;
  Held get_bit_generator;               // null before NumPy 1.24
  Held random_state;                    // the global RandomState
  const NumpyNormal* normal = nullptr;  // in it; null where it is of another kind
  Held generator;                       // held, so that no other one gets its address
  Held acquire;
  Held release;
  const NumpyTwister* twister = nullptr;  // null where it is of another kind
};

/// Where `generator` keeps its state; null where it is of another kind.
const NumpyTwister* twister_of(const py::object& generator, const py::object& numpy_random) {
  if (!py::type::handle_of(generator).is(numpy_random.attr("MT19937"))) return nullptr;
  const auto address = generator.attr("ctypes").attr("state_address").cast<uintptr_t>();
  return reinterpret_cast<const NumpyTwister*>(address);
}

const NumpyNormal* normal_of(const Held& random_state, const py::object& numpy_random) {
  const py::object kind = numpy_random.attr("RandomState");
  if (!py::type::handle_of(random_state.handle()).is(kind)) return nullptr;
  const std::optional<size_t> place = place_of_normal(kind);
  if (!place) return nullptr;
  const NumpyNormal& normal = normal_in(random_state.get(), *place);
  return points_into(normal.bit_generator, random_state.get()) ? &normal : nullptr;
}

/// The global generator, with its lock and its memory.
const Known& look_up(const py::object& numpy_random) {
  static Known& known = *new Known;  // outlives the interpreter
  if (known.module.get() != numpy_random.ptr()) {
    known = Known();
    known.module = Held(numpy_random);
    known.random_state = Held(numpy_random.attr("standard_normal").attr("__self__"));
    known.normal = normal_of(known.random_state, numpy_random);
    if (py::hasattr(numpy_random, "get_bit_generator")) {
      known.get_bit_generator = Held(numpy_random.attr("get_bit_generator"));
    }
  }
  if (!known.get_bit_generator) return known;
  const py::object generator = known.get_bit_generator.handle()();
  if (known.generator.get() == generator.ptr()) return known;
  known.generator = Held(generator);
  known.acquire = Held(generator.attr("lock").attr("acquire"));
  known.release = Held(generator.attr("lock").attr("release"));
  known.twister = twister_of(generator, numpy_random);
  return known;
}

/// Null where memory must not be read.
const NumpyTwister* find_twister(const Known& known, const py::object& numpy_random) {
  if (known.twister == nullptr || known.normal == nullptr) return nullptr;
  // A thread that fills an array has the lock and not the GIL. Where nobody has it, nobody can draw
  // before the GIL is given away, which nothing here does.
  if (!known.acquire.handle()(false).cast<bool>()) return nullptr;
  known.release.handle()();
  static const bool laid_out_so = is_laid_out_so(*known.twister, numpy_random);
  return laid_out_so ? known.twister : nullptr;
}

}  // namespace

std::function<void()> save_numpy_random(const py::object& numpy_random) {
  const Known& known = look_up(numpy_random);
  const Held module = known.module;
  const NumpyTwister* twister = find_twister(known, numpy_random);
  if (twister == nullptr) {
    const Held state(numpy_random.attr("get_state")(py::arg("legacy") = false));
    return [module, state] {
      restore_full(module, py::reinterpret_borrow<py::object>(state.handle()));
    };
  }
  const auto before = recycled(*twister);
  const bool has_gauss = known.normal->has_gauss != 0;
  const double gauss = has_gauss ? known.normal->gauss : 0;
  return [module, before, has_gauss, gauss] {
    restore_full(module, full_state(*before, has_gauss, gauss));
  };
}

}  // namespace infinitybatch::python
