#pragma once

#include "core/foreign_exception.hpp"
#include "core/row_range.hpp"
#include "core/thread_context.hpp"
#include "execute/plain_state.hpp"

#include <infinitybatch/core/batch.hpp>

#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace infinitybatch {

/// How to look at what lies in plain attributes of a model.
struct PlainLook {
  std::function<PlainState()> state;
  std::function<std::vector<NamedParameter>()> tensors;  ///< those alone
};

/// What is known of a model's numbers in Python, from one step to the next.
class PlainNumbers {
 public:
  enum class Kind {
    unknown,
    harmless,  ///< each forward writes it anew, or the first one alone
    counter,   ///< moves with each forward: once for each logical batch
    sum,       ///< moves by as much as there are samples
  };
  /// While it lives, steps in this thread learn of these.
  using Scope = Within<&ThreadContext::numbers>;
  /// Null where nobody remembers.
  static PlainNumbers* at_work() noexcept;

  Kind kind_of(const std::string& name) const;
  void learn(const std::string& name, Kind kind);
  /// Whether the step's next forward, or the next step's, finds another state than this one did and
  /// may be another program.
  bool moves() const;
  void note_move(bool moves);
  /// Whether forward depends on more than counters: all of its state is put back.
  bool whole() const;
  void learn_whole();
  /// A run was undone that had moved this, which nobody can put back. Empty: nothing.
  std::string lost() const;
  void note_lost(const std::string& name);
  /// Whether another experiment may be made: names that are new in each step would ask for ever.
  bool may_ask();

 private:
  mutable std::mutex mutex_;
  std::map<std::string, Kind> kinds_;
  bool moves_ = false;
  bool whole_ = false;
  std::string lost_;
  int asked_ = 0;
};

/// Plain state of Python's around the forwards of one logical batch. The whole batch's forward runs
/// once: each micro-batch has to see the numbers that it would have seen (a warm-up counter), and
/// they move once. Runs that do not count leave everything as it was.
class PlainRuns {
 public:
  /// With what is known of earlier steps, where somebody remembers.
  PlainRuns() : known_(PlainNumbers::at_work() != nullptr ? PlainNumbers::at_work() : &own_) {}
  PlainRuns(const PlainRuns&) = delete;
  PlainRuns& operator=(const PlainRuns&) = delete;

  /// In front of the first forward; returns the tensors that lie there.
  std::vector<NamedParameter> begin(const PlainLook& look);
  /// After it; where its numbers are known, `after_part` follows.
  void first_is_over();
  bool begun() const noexcept { return begun_; }
  /// Whether the first forward left everything as it was.
  bool quiet() const noexcept { return !changed_; }
  /// Whether that is true of all places where tensors are looked for.
  bool found_all_the_same() const noexcept { return begun_ && base_.complete && !changed_; }
  /// Whether some state is to be put back in front of each micro-batch.
  bool counts() const;
  /// Whether another forward finds other numbers than this one did, or may.
  bool moves() const { return known_->moves(); }

  /// In front of a further forward of the same batch.
  void before_part() const { put_back(/*guess=*/wants_to_learn()); }
  /// After each forward of a part. \throws CouplingError naming a number that micro-batches leave
  /// different
  void after_part();
  /// Whether a CouplingError was thrown here: for state, which one micro-batch leaves as natively.
  bool found() const noexcept { return found_; }
  /// The first part runs once more, and counts instead of the first time.
  void count_anew();
  /// A batch's numbers are as natively.
  void commit() const;
  /// Everything is as in front of the first forward.
  void roll_back();
  /// Another batch begins.
  void forget();

  /// Whether `learn` should be asked, in front of the second micro-batch.
  /// \param any whatever was changed, numbers or not
  bool wants_to_learn(bool any = false) const;
  /// Whether forward reads state that it changes, by experiment: it runs on other rows than the
  /// first with what the first has left and with what that found, and on some of them.
  /// \param total samples of the logical batch
  /// \param run   forward on these rows, always under the same random state and buffers
  void learn(Rows first, int64_t total, const std::function<Batch(Rows)>& run);

  /// Runs forward for something that does not count.
  /// \param as_first it finds the numbers that the first forward found
  template <typename Run>
  auto uncounted(const Run& run, bool as_first = true) const {
    if (!begun_ || quiet()) return run();
    const PlainState now = look_.state();
    if (as_first) put_back(/*guess=*/true);
    try {
      auto result = run();
      note_remade(now);
      now.restore();
      check_can_put_back();
      return result;
    } catch (...) {
      keep_foreign_exception(std::current_exception());
      now.restore();
      throw;
    }
  }
  /// Whom to tell of parameters that such a run has made anew, and of those that stay in their
  /// places.
  using Remade = std::function<void(const at::Tensor& made, const at::Tensor& stands)>;
  void tell_remade(Remade remade) { remade_ = std::move(remade); }
  /// In front of a run that somebody else undoes.
  void show_first_numbers() const {
    if (begun_ && !quiet()) put_back(/*guess=*/true);
  }
  /// The whole batch is one micro-batch: a further run has to find all as the first found it.
  void set_single() noexcept { single_ = true; }

 private:
  void put_back(bool guess) const;
  void note_remade(const PlainState& now) const;
  void note_move() const;
  /// \throws Unsupported where forward has moved what cannot be put back
  void check_can_put_back() const;
  void meet_left();
  void meet_parameters();
  /// \throws CouplingError where outputs depend on this number
  void check_unread(const std::string& name, Rows first, const Batch& wanted,
                    const std::function<Batch(Rows)>& run, const PlainState& now) const;

  PlainNumbers own_;
  PlainNumbers* known_;
  PlainLook look_;
  PlainState base_;
  bool begun_ = false;
  bool changed_ = false;
  bool single_ = false;
  bool asks_ = true;                         // no experiment has failed
  std::vector<PlainNumber> moved_;           // by the first forward
  std::vector<std::string> replaced_;        // by it, and no numbers
  std::map<std::string, std::string> left_;  // by it, of counters
  std::map<std::string, double> sums_;
  std::map<std::string, std::string> kept_;  // where all state is put back: what it left
  std::map<std::string, at::Tensor> made_;   // parameters, by the first forward
  Remade remade_;
  bool met_first_ = false;
  bool found_ = false;
};

}  // namespace infinitybatch
