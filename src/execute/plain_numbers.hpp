#pragma once

#include "core/thread_context.hpp"

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace infinitybatch {

/// What is known of what a model keeps in Python, from one step to the next.
class PlainNumbers {
 public:
  enum class Kind {
    unknown,
    written,  ///< each forward writes it anew, of its samples: a log
    kept,     ///< the same, and of any samples: a flag that stays, a list that grows
    once,     ///< of any samples, and as the first forward left it: a table, a parameter
    counter,  ///< moves with each forward: once for each logical batch
    sum,      ///< moves by as much as there are samples
    total,    ///< is written anew, the sum over samples
    mean,     ///< the same, their mean
  };
  /// While it lives, steps in this thread learn of these.
  using Scope = Within<&ThreadContext::numbers>;
  /// Null where nobody remembers.
  static PlainNumbers* at_work() noexcept;

  Kind kind_of(const std::string& name) const;
  void learn(const std::string& name, Kind kind);
  /// Whether a step has left what is one micro-batch's alone.
  bool left_apart() const;
  void note_left_apart();
  /// Whether the step's next forward, or the next step's, finds another state than this one did and
  /// may be another program.
  bool moves() const;
  void note_move(bool moves);
  /// Whether forward reads state that depends on the samples of the micro-batch that left it.
  bool reads_apart() const;
  void learn_reads_apart();
  /// Whether forward gives other outputs once it finds what it has left.
  bool reads_own() const;
  void learn_reads_own();
  /// A run was undone that had moved this, which nobody can put back. Empty: nothing.
  std::string lost() const;
  void note_lost(const std::string& name);
  /// A step begins.
  void begin();
  /// Whether another experiment may be made: names that are new in each step would ask for ever.
  bool may_ask();
  /// Whether what was found not to be read is asked for once more: it may be read from now on.
  bool asks_again(bool decides) const;

 private:
  mutable std::mutex mutex_;
  std::map<std::string, Kind> kinds_;
  bool moves_ = false;
  bool reads_apart_ = false;
  bool reads_own_ = false;
  bool left_apart_ = false;
  std::string lost_;
  int asked_ = 0;
  int64_t steps_ = 0;
};

}  // namespace infinitybatch
