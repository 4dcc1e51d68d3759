#pragma once

#include "execute/plain_state.hpp"
#include "held.hpp"

#include <c10/util/flat_hash_map.h>

#include <memory>
#include <string>
#include <vector>

namespace infinitybatch::python {

/// What Python objects hold, so that a run which does not count can be undone as one thing: the
/// attributes of modules with their hooks, children and names of parameters and buffers; lists,
/// dicts, sets and deques there; attributes of other objects (configurations, caches); what hooks
/// and functions have in their closures. A few levels deep. Tensors are kept by identity, and
/// buffers by name alone: who watches memory and buffers puts their values back. Of containers with
/// very many items only the number of these is kept, so that what is added behind them can be
/// removed. The GIL is held by every call.
class PlainSnapshot {
 public:
  /// \param tensors gets those that lie there and are no parameters; null where nobody asks
  explicit PlainSnapshot(std::vector<NamedParameter>* tensors = nullptr) : tensors_(tensors) {}
  ~PlainSnapshot();
  PlainSnapshot(const PlainSnapshot&) = delete;
  PlainSnapshot& operator=(const PlainSnapshot&) = delete;

  /// Whether it is new here.
  bool meet(PyObject* object) { return seen_.insert(object).second; }
  /// The attributes of a module, which was met. \param prefix of their names: "layers.0."
  void module(PyObject* attributes, const std::string& prefix);
  /// Any object that is no module.
  void object(PyObject* value, const std::string& name, int depth);

  void collect_no_more() { tensors_ = nullptr; }

  /// Whether some container was left out for its size.
  bool overlooked() const noexcept { return overlooked_; }
  bool changed() const;
  void restore() const;
  /// Numbers, flags and text that are others now; each keeps what it stands in alive.
  std::vector<PlainNumber> numbers() const;
  /// All else that is another now.
  std::vector<PlainObject> objects() const;

 private:
  enum class Kind { dict, ordered, list, other, cell, large };
  struct Entry {
    Kind kind;
    PyObject* now;     // owned
    PyObject* before;  // owned: a copy; null of what was empty; of a large one its size
    bool names_only;   // of buffers
    std::string name;
  };
  /// A dict or set without an item: most of a module's hooks.
  struct Empty {
    PyObject* now;  // owned
    PyObject* key;  // among the attributes of a module, which are an entry
    size_t entry;
  };

  /// An iterator stands at some place of what it reads. It cannot be set back: a copy takes its
  /// place in everything here that holds it.
  struct Iterator {
    Held now;
    Held before;        // a copy; null where there is none or it cannot be handed in
    std::string place;  // where it stood
    std::string name;
    std::vector<Held> reads;  // iterators that move with it
  };
  /// What holds it, and how to set another one there.
  struct Holder {
    Held owner;
    Held key;
    PyObject* value;  // there now, borrowed
    void (*set)(PyObject*, PyObject*, PyObject*);
  };

  void iterator(PyObject* value, const std::string& name, bool in_tuple);
  void iterators_in_tuple(PyObject* tuple, const std::string& name);
  std::vector<Holder> holders_of(const Iterator& each) const;
  bool has_moved(const Iterator& each, std::string* place = nullptr) const;
  static void hand_in(const std::vector<Holder>& holders, PyObject* before);
  void put_back_iterators() const;
  void add_moved_iterators(std::vector<PlainNumber>& found) const;

  void add(Kind kind, PyObject* now, PyObject* before, std::string name, bool names_only = false);
  void tensor(PyObject* value, const std::string& name);
  bool tree(PyObject* module, const std::string& name);
  void large(PyObject* value, const std::string& name);
  void dict(PyObject* value, const std::string& name, int depth);
  void items(PyObject* value, const std::string& name, int depth);
  void function(PyObject* value, const std::string& name, int depth);
  static bool differs(const Entry& entry);
  static void put_back(const Entry& entry);
  std::string name_of(const Empty& empty) const;

  std::vector<Entry> entries_;
  std::vector<Iterator> iterators_;
  std::vector<Empty> empty_;
  ska::flat_hash_set<PyObject*> seen_;
  bool overlooked_ = false;
  std::vector<NamedParameter>* tensors_;
};

}  // namespace infinitybatch::python
