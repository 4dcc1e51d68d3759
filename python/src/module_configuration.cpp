#include "held.hpp"
#include "module_attributes.hpp"
#include "module_walk.hpp"
#include "object_serials.hpp"

#include <c10/util/flat_hash_map.h>
#include <c10/util/hash.h>
#include <structmember.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <bit>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

namespace infinitybatch::python {
namespace {

PyObject* class_of(const char* module, const char* name) {
  return py::object(py::module_::import(module).attr(name)).release().ptr();
}

/// What a class says of its instances, asked for once.
struct Kind {
  bool of_torch = false;  ///< its attributes are no settings of the user's
  bool of_loop = false;   ///< an optimizer, a trainer: forward does not read it, and it changes
  bool is_enum = false;
  Held held;  ///< so that nobody else gets its address
};

bool begins_with_any(const std::string& name, std::initializer_list<std::string_view> beginnings) {
  return std::any_of(beginnings.begin(), beginnings.end(), [&](std::string_view beginning) {
    return name == beginning || name.starts_with(std::string(beginning) + ".");
  });
}

const Kind& kind_of(PyTypeObject* type) {
  static auto& known = *new std::unordered_map<PyTypeObject*, Kind>;
  const auto found = known.find(type);
  if (found != known.end()) return found->second;
  constexpr size_t kMost = 4096;  // classes that are made anew all the time
  if (known.size() >= kMost) known.clear();
  static PyObject* const enums = class_of("enum", "EnumMeta");
  const auto object = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(type));
  const std::string module = py::str(py::getattr(object, "__module__", py::str("")));
  Kind kind;
  kind.of_torch = begins_with_any(module, {"torch", "builtins"});
  kind.of_loop =
      begins_with_any(module, {"torch.optim", "torch.utils.data", "torch.amp", "logging",
                               "threading", "infinitybatch", "lightning", "lightning_fabric",
                               "pytorch_lightning", "accelerate", "transformers.trainer", "wandb"});
  kind.is_enum = PyObject_TypeCheck(object.ptr(), reinterpret_cast<PyTypeObject*>(enums)) != 0;
  kind.held = Held(object);
  return known.emplace(type, std::move(kind)).first->second;
}

/// Attributes that every module has: listed elsewhere, or nothing to forward.
bool is_internal(PyObject* name) {
  static const std::array<PyObject*, 13> kNames{
      interned("_parameters"),
      interned("_buffers"),
      modules_name(),
      interned("_non_persistent_buffers_set"),
      interned("_backward_pre_hooks"),
      interned("_backward_hooks"),
      interned("_forward_hooks"),
      interned("_forward_pre_hooks"),
      interned("_state_dict_hooks"),
      interned("_state_dict_pre_hooks"),
      interned("_load_state_dict_pre_hooks"),
      interned("_load_state_dict_post_hooks"),
      interned("_is_full_backward_hook"),
  };
  return is_one_of(name, kNames);
}

/// Each kind of value begins with a number of its own: 1, 1.0 and True have one hash in Python.
enum class Tag : uint64_t {
  integer = 1,
  real,
  text,
  tuple,
  list,
  dict,
  set,
  method,
  partial,
  type,
  other
};

class Hashing {
 public:
  explicit Hashing(bool nested) : nested_(nested) {}

  void module(PyObject* module) {
    if (is_known(module)) return;
    identity(module);
    of_type(Py_TYPE(module));
    const auto attributes =
        py::reinterpret_steal<py::object>(PyObject_GenericGetDict(module, nullptr));
    if (!attributes) return PyErr_Clear();
    if (!PyDict_CheckExact(attributes.ptr())) return;
    each_of(attributes.ptr(), [&](PyObject* key, PyObject* value) {
      if (is_internal(key)) return;
      setting(key, 0);
      setting(value, 0);
    });
    static PyObject* const hooks_name = interned("_forward_hooks");
    static PyObject* const pre_hooks_name = interned("_forward_pre_hooks");
    for (PyObject* name : {hooks_name, pre_hooks_name}) {
      if (PyObject* hooks = PyDict_GetItemWithError(attributes.ptr(), name)) this->hooks(hooks);
    }
    PyObject* children = PyDict_GetItemWithError(attributes.ptr(), modules_name());
    if (children == nullptr || !PyDict_Check(children)) return;  // ordered, in old pickles
    each_of(children, [&](PyObject*, PyObject* child) {
      if (child != Py_None) this->module(child);
    });
  }

  void object(PyObject* object) { setting(object, 0); }

  uint64_t value() const noexcept { return value_; }

 private:
  static constexpr int kDeepestTuple = 2;  // where nested settings are not asked for
  static constexpr int kDeepest = 12;
  static constexpr int64_t kMostValues = int64_t{1} << 16;
  static constexpr Py_ssize_t kMostBytes = Py_ssize_t{1} << 16;

  void mix(uint64_t number) { value_ = c10::hash_combine(value_, number); }
  void mix(Tag tag) { mix(static_cast<uint64_t>(tag)); }

  void identity(PyObject* object) {
    const auto serial = serial_of(object);
    mix(serial ? *serial : reinterpret_cast<uintptr_t>(object));
  }

  /// Whether it was met before; if so, which it was is mixed in.
  bool is_known(PyObject* object) {
    const auto [place, anew] = met_.emplace(object, met_.size());
    if (!anew) mix(place->second);
    return !anew;
  }

  template <typename Act>
  static void each_of(PyObject* dict, const Act& act) {
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &value) != 0;) {
      // Whatever runs meanwhile (a collection of garbage) may take them out.
      const auto held_key = py::reinterpret_borrow<py::object>(key);
      const auto held_value = py::reinterpret_borrow<py::object>(value);
      act(key, value);
    }
  }

  void hooks(PyObject* hooks) {
    if (!PyDict_Check(hooks)) return;  // an OrderedDict mostly
    each_of(hooks, [&](PyObject* key, PyObject* value) {
      setting(key, 0);
      setting(value, 0);
    });
  }

  /// Attributes of a class of the user's, and of those that it derives from.
  void of_type(PyTypeObject* type) {
    PyObject* const order = type->tp_mro;
    if (order == nullptr || !PyTuple_Check(order))
      return identity(reinterpret_cast<PyObject*>(type));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(order); ++i) {
      PyObject* const base = PyTuple_GET_ITEM(order, i);
      if (!PyType_Check(base)) continue;
      auto* const kind = reinterpret_cast<PyTypeObject*>(base);
      if ((kind->tp_flags & Py_TPFLAGS_HEAPTYPE) == 0 || kind_of(kind).of_torch) continue;
      if (is_known(base)) continue;
      identity(base);
      if (kind->tp_dict == nullptr) continue;
      each_of(kind->tp_dict, [&](PyObject* key, PyObject* value) {
        if (!PyUnicode_Check(key) || is_hidden(key)) return;
        mix(Tag::type);
        setting(key, 0);
        setting(value, 0);
      });
    }
  }

  /// Two underscores around a name: what the interpreter keeps there.
  static bool is_hidden(PyObject* name) {
    const Py_ssize_t length = PyUnicode_GET_LENGTH(name);
    return length > 4 && PyUnicode_READ_CHAR(name, 0) == '_' &&
           PyUnicode_READ_CHAR(name, 1) == '_' && PyUnicode_READ_CHAR(name, length - 1) == '_';
  }

  void setting(PyObject* value, int depth) {
    if (depth > kDeepest || ++values_ > kMostValues) return mix(Tag::other);
    if (value == Py_None || PyBool_Check(value)) {
      mix(reinterpret_cast<uintptr_t>(value));
    } else if (PyLong_CheckExact(value)) {
      int overflow = 0;
      mix(Tag::integer);
      mix(static_cast<uint64_t>(PyLong_AsLongLongAndOverflow(value, &overflow)));
      if (overflow != 0) mix(static_cast<uint64_t>(PyObject_Hash(value)));
    } else if (PyFloat_CheckExact(value)) {
      mix(Tag::real);
      mix(std::bit_cast<uint64_t>(PyFloat_AS_DOUBLE(value)));
    } else if (PyUnicode_CheckExact(value)) {
      mix(Tag::text);
      mix(static_cast<uint64_t>(PyObject_Hash(value)));
    } else if (PyFunction_Check(value)) {
      function(value, depth);
    } else if (PyMethod_Check(value)) {
      mix(Tag::method);
      setting(PyMethod_GET_FUNCTION(value), depth + 1);
      owner(PyMethod_GET_SELF(value), depth);
    } else if (PyCFunction_Check(value)) {
      mix(Tag::method);
      identity(value);
      if (PyObject* self = PyCFunction_GET_SELF(value)) owner(self, depth);
    } else if (is_partial(value)) {
      mix(Tag::partial);
      for (const char* part : {"func", "args", "keywords"}) {
        const auto found = py::reinterpret_steal<py::object>(PyObject_GetAttrString(value, part));
        if (!found) {
          PyErr_Clear();
        } else if (PyDict_Check(found.ptr())) {
          entries(found.ptr(), depth);
        } else {
          setting(found.ptr(), depth);
        }
      }
    } else if (PyTuple_CheckExact(value)) {
      mix(Tag::tuple);
      if (!nested_ && depth == kDeepestTuple) return;
      items(value, depth);
    } else if (nested_) {
      nested(value, depth);
    } else if (PyType_Check(value)) {
      identity(value);
    }
  }

  /// Whom a method belongs to.
  void owner(PyObject* self, int depth) {
    if (PyModule_Check(self) || PyType_Check(self)) return identity(self);
    setting(self, depth + 1);
    if (!nested_ && serial_of(self)) identity(self);
  }

  static bool is_partial(PyObject* value) {
    static PyObject* const partials = class_of("functools", "partial");
    return PyObject_TypeCheck(value, reinterpret_cast<PyTypeObject*>(partials)) != 0;
  }

  void function(PyObject* value, int depth) {
    identity(value);
    if (!nested_ || is_known(value)) return;
    for (PyObject* defaults : {PyFunction_GET_DEFAULTS(value), PyFunction_GET_KW_DEFAULTS(value)}) {
      if (defaults != nullptr) setting(defaults, depth + 1);
    }
    PyObject* const closure = PyFunction_GET_CLOSURE(value);
    if (closure == nullptr) return;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(closure); ++i) {
      PyObject* const inside = PyCell_GET(PyTuple_GET_ITEM(closure, i));
      if (inside != nullptr) setting(inside, depth + 1);
    }
  }

  /// Of so many items: a vocabulary is no setting, and would be most of a step's time.
  static Py_ssize_t looked_at(Py_ssize_t items) {
    constexpr Py_ssize_t kMost = 4096, kFew = 256;
    return items > kMost ? kFew : items;
  }

  void items(PyObject* sequence, int depth) {
    mix(static_cast<uint64_t>(PySequence_Fast_GET_SIZE(sequence)));
    const Py_ssize_t read = looked_at(PySequence_Fast_GET_SIZE(sequence));
    for (Py_ssize_t i = 0; i < read && i < PySequence_Fast_GET_SIZE(sequence); ++i) {
      const auto item = py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(sequence, i));
      setting(item.ptr(), depth + 1);
    }
  }

  void entries(PyObject* dict, int depth) {
    mix(Tag::dict);
    mix(static_cast<uint64_t>(PyDict_Size(dict)));
    Py_ssize_t left = looked_at(PyDict_Size(dict));
    each_of(dict, [&](PyObject* key, PyObject* value) {
      if (--left < 0) return;
      setting(key, depth + 1);
      setting(value, depth + 1);
    });
  }

  /// Under which name a descriptor of the interpreter's holds its function; null for what is none.
  static const char* name_of_held(PyObject* value) {
    if (PyObject_TypeCheck(value, &PyProperty_Type) != 0) return "fget";
    const bool wraps = PyObject_TypeCheck(value, &PyStaticMethod_Type) != 0 ||
                       PyObject_TypeCheck(value, &PyClassMethod_Type) != 0;
    return wraps ? "__func__" : nullptr;
  }

  /// Containers and objects, by what they hold.
  void nested(PyObject* value, int depth) {
    // None of these can be referred to weakly, and an address is given again.
    if (const char* const held = name_of_held(value)) {
      const auto function = py::reinterpret_steal<py::object>(PyObject_GetAttrString(value, held));
      if (!function) return PyErr_Clear();
      mix(Tag::method);
      return setting(function.ptr(), depth + 1);
    }
    if (PySlice_Check(value)) {
      auto* const slice = reinterpret_cast<PySliceObject*>(value);
      mix(Tag::tuple);
      for (PyObject* each : {slice->start, slice->stop, slice->step}) setting(each, depth + 1);
      return;
    }
    static PyObject* const modules = class_of("torch.nn", "Module");
    if (is_tensor(value) || PyModule_Check(value)) return identity(value);
    if (PyObject_TypeCheck(value, reinterpret_cast<PyTypeObject*>(modules))) return module(value);
    if (PyType_Check(value)) return of_class(reinterpret_cast<PyTypeObject*>(value));
    const Kind& kind = kind_of(Py_TYPE(value));
    if (kind.of_loop || kind.is_enum) return identity(value);
    if (is_known(value)) return;
    mix(Tag::other);
    identity(reinterpret_cast<PyObject*>(Py_TYPE(value)));
    bool told = true;
    if (PyList_Check(value) || PyTuple_Check(value)) {
      items(value, depth);
    } else if (PyODict_Check(value)) {
      in_its_order(value, depth);
    } else if (PyDict_Check(value)) {
      entries(value, depth);
    } else if (PyAnySet_Check(value)) {
      in_any_order(value, depth);
    } else {
      told = is_queue(value) && copied(value, depth);
    }
    static PyObject* const spaces = class_of("types", "SimpleNamespace");
    const bool of_user = (Py_TYPE(value)->tp_flags & Py_TPFLAGS_HEAPTYPE) != 0 ||
                         reinterpret_cast<PyObject*>(Py_TYPE(value)) == spaces;
    if (of_user) told = attributes(value, depth) || told;
    if (!told && !bytes(value)) by_itself(value, of_user);
  }

  /// Of an OrderedDict, whose order is its own.
  void in_its_order(PyObject* dict, int depth) {
    entries(dict, depth);
    if (PyDict_Size(dict) > looked_at(PyDict_Size(dict))) return;
    const auto keys = py::reinterpret_steal<py::object>(PySequence_List(dict));
    if (!keys) return PyErr_Clear();
    items(keys.ptr(), depth);
  }

  void of_class(PyTypeObject* type) {
    identity(reinterpret_cast<PyObject*>(type));
    of_type(type);
  }

  void in_any_order(PyObject* set, int depth) {
    mix(Tag::set);
    const auto all = py::reinterpret_steal<py::object>(PySequence_List(set));
    if (!all) return PyErr_Clear();
    uint64_t sum = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(all.ptr()); ++i) {
      const uint64_t before = std::exchange(value_, 0);
      setting(PyList_GET_ITEM(all.ptr(), i), depth + 1);
      sum += std::exchange(value_, before);
    }
    mix(sum);
  }

  static bool is_queue(PyObject* value) {
    static PyObject* const queues = class_of("collections", "deque");
    return Py_TYPE(value) == reinterpret_cast<PyTypeObject*>(queues);
  }

  bool copied(PyObject* queue, int depth) {
    const auto all = py::reinterpret_steal<py::object>(PySequence_List(queue));
    if (!all) {
      PyErr_Clear();
      return false;
    }
    items(all.ptr(), depth);
    return true;
  }

  /// What an object of the user's own class holds, in its `__dict__` and in slots.
  bool attributes(PyObject* object, int depth) {
    of_type(Py_TYPE(object));
    bool any = false;
    const auto own = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(object, nullptr));
    if (!own) {
      PyErr_Clear();
    } else if (PyDict_Check(own.ptr())) {
      any = true;
      entries(own.ptr(), depth);
    }
    PyObject* const order = Py_TYPE(object)->tp_mro;
    for (Py_ssize_t i = 0; order != nullptr && i < PyTuple_GET_SIZE(order); ++i) {
      auto* const kind = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(order, i));
      if ((kind->tp_flags & Py_TPFLAGS_HEAPTYPE) == 0 || kind->tp_dict == nullptr) continue;
      each_of(kind->tp_dict, [&](PyObject*, PyObject* descriptor) {
        if (Py_TYPE(descriptor) != &PyMemberDescr_Type) return;
        any = true;
        auto* const member = reinterpret_cast<PyMemberDescrObject*>(descriptor)->d_member;
        const auto slot = py::reinterpret_steal<py::object>(
            PyMember_GetOne(reinterpret_cast<const char*>(object), member));
        slot ? setting(slot.ptr(), depth + 1) : PyErr_Clear();
      });
    }
    return any;
  }

  /// Of arrays, as NumPy's.
  bool bytes(PyObject* value) {
    if (PyObject_CheckBuffer(value) == 0) return false;
    Py_buffer view;
    if (PyObject_GetBuffer(value, &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) {
      PyErr_Clear();
      return false;
    }
    const bool few = view.len <= kMostBytes;
    if (few) {
      const auto* begin = static_cast<const char*>(view.buf);
      mix(std::hash<std::string_view>()({begin, static_cast<size_t>(view.len)}));
      for (int i = 0; i < view.ndim; ++i) mix(static_cast<uint64_t>(view.shape[i]));
    }
    PyBuffer_Release(&view);
    return few;
  }

  /// What shows nobody what it holds.
  void by_itself(PyObject* value, bool of_user) {
    if (const auto serial = serial_of(value)) return mix(*serial);
    if (of_user || Py_TYPE(value)->tp_hash == nullptr) return;
    const Py_hash_t hash = PyObject_Hash(value);  // dtypes, devices, NumPy's numbers: no user code
    hash == -1 ? PyErr_Clear() : mix(static_cast<uint64_t>(hash));
  }

  const bool nested_;
  ska::flat_hash_map<PyObject*, uint64_t> met_;
  int64_t values_ = 0;
  uint64_t value_ = 0;
};

}  // namespace

uint64_t configuration_of(py::handle model, bool nested) {
  Hashing hashing(nested);
  hashing.module(model.ptr());
  return hashing.value();
}

uint64_t settings_of(py::handle object) {
  Hashing hashing(/*nested=*/true);
  hashing.object(object.ptr());
  return hashing.value();
}

}  // namespace infinitybatch::python
