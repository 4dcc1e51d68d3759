// NumPy's global random state without get_state(), which converts 624 numbers one by one.
//
// The state has two parts. MT19937's key and position lie at `bit_generator.ctypes.state_address`,
// a public attribute. Whether a second normal number is cached, and which, is told by get_state()
// alone, but seen by drawing one: standard_normal() takes the cached number and leaves key and
// position alone, or makes two and caches the second. NumPy promises that this stream will never
// change (NEP 19). Whatever was drawn is put back at once.
#include "numpy_random.hpp"

#include "core/recycled.hpp"

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>

namespace infinitybatch::python {
namespace {

constexpr size_t kNumpyWords = 624;

/// As NumPy's mt19937_state; `is_laid_out_so` compares it with get_state() once.
struct NumpyTwister {
  std::array<uint32_t, kNumpyWords> key;
  int32_t pos;
};

void restore_full(const Held& numpy_random, const py::object& state) {
  numpy_random.handle().attr("set_state")(state);
}

py::dict full_state(const NumpyTwister& twister, bool has_gauss, const py::object& gauss) {
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

/// What is asked in every step: looked up once for a generator.
struct Known {
  Held module;
  Held get_bit_generator;  // null before NumPy 1.24
  Held standard_normal;
  Held generator;  // held, so that no other one gets its address
  Held acquire;
  Held release;
  NumpyTwister* twister = nullptr;  // null where it is of another kind
};

/// Where `generator` keeps its state; null where it is of another kind.
NumpyTwister* twister_of(const py::object& generator, const py::object& numpy_random) {
  if (!py::type::handle_of(generator).is(numpy_random.attr("MT19937"))) return nullptr;
  const auto address = generator.attr("ctypes").attr("state_address").cast<uintptr_t>();
  return reinterpret_cast<NumpyTwister*>(address);
}

/// The global generator, with its lock and its memory.
const Known& look_up(const py::object& numpy_random) {
  static Known& known = *new Known;  // outlives the interpreter
  if (known.module.get() != numpy_random.ptr()) {
    known = Known();
    known.module = Held(numpy_random);
    known.standard_normal = Held(numpy_random.attr("standard_normal"));
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
NumpyTwister* find_twister(const Known& known, const py::object& numpy_random) {
  if (known.twister == nullptr) return nullptr;
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
  NumpyTwister* twister = find_twister(known, numpy_random);
  if (twister == nullptr) {
    const Held state(numpy_random.attr("get_state")(py::arg("legacy") = false));
    return [module, state] {
      restore_full(module, py::reinterpret_borrow<py::object>(state.handle()));
    };
  }
  const auto before = recycled(*twister);
  const py::handle draw = known.standard_normal.handle();
  const py::object number = draw();
  const bool was_cached = std::memcmp(twister, before.get(), sizeof(NumpyTwister)) == 0;
  if (was_cached) {
    // Rare: an odd number of normal numbers has been drawn.
    const py::dict state = full_state(*before, true, number);
    restore_full(module, state);
    return [module, state = Held(state)] {
      restore_full(module, py::reinterpret_borrow<py::object>(state.handle()));
    };
  }
  draw();  // takes the number that the first call cached
  *twister = *before;
  return [module, before] { restore_full(module, full_state(*before, false, py::float_(0.0))); };
}

}  // namespace infinitybatch::python
