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
  std::function<void()> put_back;  ///< empty where nobody can: a generator
  /// With `by`: what it was, and this much more.
  std::function<void(double)> move;
};

/// Anything else that forward left changed there: an object, a tensor, a container of other items.
struct PlainObject {
  std::string name;
  /// By its value, a few levels deep: equal text, equal state.
  std::function<std::string()> describe;
  // Parameters that require grad and stand there now, or stood there before; undefined for others.
  at::Tensor parameter;
  at::Tensor before;
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
