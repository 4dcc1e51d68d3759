#pragma once

#include "execute/plain_state.hpp"
#include "held.hpp"

#include <infinitybatch/core/model.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace infinitybatch::python {

/// What a torch.nn.Module owns, as `ModelView._walk` finds it.
struct Owned {
  std::vector<NamedParameter> parameters;
  std::vector<BufferSlot> buffers;
};

/// Walks over a tree of ordinary modules without an interpreter: it is done in every step. Nothing
/// where any module or parameter is not quite ordinary (subclasses of parameters, lazy or scripted
/// modules, overridden traversal, compiled calls): then Python looks, and explains.
/// The GIL is held.
std::optional<Owned> walk_ordinary(py::handle model);

/// Tensors in plain attributes of the modules of a tree, and in tuples, lists and dicts there, two
/// deep and of at most 16 items; and a snapshot of all that lies there (see `PlainSnapshot`). The
/// GIL is held.
PlainState plain_state(py::handle model);
/// The same of whatever a function, a bound method or a module holds, buffers among the tensors.
PlainState held_state(py::handle object);
/// The tensors alone.
std::vector<NamedParameter> plain_tensors(py::handle model);

/// Another number where the modules of a tree are others, or set otherwise: the mode of each, its
/// numbers, text, tuples of them, functions, partials and methods in plain attributes and in those
/// of its class, its forward hooks. Everything by value or by a number that is given once.
/// \param nested also what lists, dicts, closures and other objects there hold, but for optimizers
///               and trainers. The GIL is held.
uint64_t configuration_of(py::handle model, bool nested);
/// The same of any object, with all that it holds.
uint64_t settings_of(py::handle object);

/// A buffer of a Python module: an entry of its `_buffers`, so that a model that binds another
/// tensor to the name is noticed. `get` and `set` take the GIL, during unwinding too.
BufferSlot dict_slot(std::string name, const Held& buffers, const Held& key);

}  // namespace infinitybatch::python
