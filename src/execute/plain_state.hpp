#pragma once

#include <infinitybatch/core/model.hpp>

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace infinitybatch {

/// A number, flag or text that forward left changed where nobody lists it: in an attribute of a
/// module, in a list, an object or a closure there; or an iterator that it moved.
struct PlainNumber {
  std::string name;                ///< "layers.0.calls"
  std::string left;                ///< what it is now, for comparisons and messages
  std::optional<double> by;        ///< how far it moved; nothing where it was or is no number
  double from = 0;                 ///< with `by`: what it was, 0 where it was not there
  bool added = false;              ///< to a container: it was not there
  bool appended = false;           ///< to a list, named by how far behind its end
  std::function<void()> put_back;  ///< empty where nobody can: a generator
  std::function<void()> put_in;    ///< what it is now, once more
  /// With `by`: another number.
  std::function<void(double)> set;
};

/// A tensor that gets a gradient and comes out of no op.
struct PlainLeaf {
  at::Tensor tensor;
  bool is_parameter = false;  ///< an `nn.Parameter`
};

/// Anything else that forward left changed there: an object, a tensor, a container of other items.
struct PlainObject {
  std::string name;
  /// By its value, a few levels deep: equal text, equal state.
  std::function<std::string()> describe;
  // Leaves that get a gradient: those that it holds now alone, and those that it held before alone.
  std::vector<PlainLeaf> leaves;
  std::vector<PlainLeaf> leaves_before;
  std::function<void()> put_in;  ///< what it is now, once more
  /// Not what an op gave, which is left for others to read: it may decide what the next forward
  /// does.
  bool decides = false;
  bool added = false;  ///< to a container of keys: it was not there
};

/// What lies in plain attributes of modules.
struct PlainState {
  std::vector<NamedParameter> tensors;
  /// Whether `changed` would see another tensor in any place where these were looked for.
  bool complete = false;
  /// Puts everything back as it was, as often as it is called; what was written into tensors in
  /// place stays written.
  std::function<void()> restore;
  /// Whether anything is another now.
  std::function<bool()> changed;
  /// Those that are others now.
  std::function<std::vector<PlainNumber>()> numbers;
  std::function<std::vector<PlainObject>()> objects;
};

}  // namespace infinitybatch
