#pragma once

#include "core/foreign_exception.hpp"
#include "core/row_range.hpp"
#include "execute/plain_numbers.hpp"
#include "execute/plain_state.hpp"

#include <infinitybatch/core/batch.hpp>

#include <exception>
#include <functional>
#include <map>
#include <optional>
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

/// Plain state of Python's around the forwards of one logical batch. The whole batch's forward runs
/// once: each micro-batch finds what the first one found, and what the last one leaves stays, where
/// all leave the same. Numbers that add up over samples, or are their mean, are put together; what
/// else they leave different forward must not read. Runs that do not count leave everything as it
/// was.
class PlainRuns {
 public:
  /// With what is known of earlier steps, where somebody remembers.
  PlainRuns() : known_(PlainNumbers::at_work() != nullptr ? PlainNumbers::at_work() : &own_) {}
  PlainRuns(const PlainRuns&) = delete;
  PlainRuns& operator=(const PlainRuns&) = delete;

  /// In front of the first forward; returns the tensors that lie there.
  std::vector<NamedParameter> begin(const PlainLook& look);
  /// After each forward; where what it changes is known, `after_part` follows.
  /// \return whether this one, or one before it, left anything changed
  bool forward_is_over();
  bool begun() const noexcept { return begun_; }
  /// Whether all forwards up to now left everything as it was.
  bool quiet() const noexcept { return !changed_; }
  /// Whether that is true of all places where tensors are looked for.
  bool found_all_the_same() const noexcept { return begun_ && base_.complete && !changed_; }

  /// In front of a further forward of the same batch.
  void before_part() const { put_back(); }
  /// After each forward that counts. \throws CouplingError naming a number that micro-batches leave
  /// different
  /// \param part another one follows
  void after_part(Rows rows, bool part);
  /// Whether earlier steps have left what is one micro-batch's alone.
  bool finds_parts() const { return known_->left_apart(); }
  /// Whether a CouplingError was thrown here: for state, which one micro-batch leaves as natively.
  bool found() const noexcept { return found_; }
  /// The first part runs once more, and counts instead of the first time.
  void count_anew() { parts_ = Parts(); }
  /// A batch's numbers are as natively.
  void commit() const;
  /// Everything is as in front of the first forward.
  void roll_back();
  /// Another batch begins.
  void forget();

  /// Whether `learn` should be asked, in front of another micro-batch or after the last one.
  bool wants_to_learn() const;
  /// By experiment: how what the last forward changed depends on the samples, and whether forward
  /// reads what depends on them.
  /// \param total samples of the logical batch
  /// \param run   forward on these rows, always under the same random state and buffers
  void learn(int64_t total, const std::function<Batch(Rows)>& run);

  /// Runs forward for something that does not count: it finds what the first forward found.
  template <typename Run>
  auto uncounted(const Run& run) const {
    if (!begun_) return run();
    if (quiet()) {
      auto result = run();
      if (base_.changed()) base_.restore();
      return result;
    }
    const PlainState now = look_.state();
    put_back();
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
    if (begun_ && !quiet()) put_back();
  }

 private:
  /// What parts have left of one number.
  struct Met {
    PlainNumber number;  ///< of the last one
    int64_t part = 0;    ///< that this was
    bool apart = false;  ///< not all left the same
    double by = 0;
    double total = 0;
    double weighted = 0;
  };
  struct Added {
    int64_t part = 0;
    std::function<void()> put_in;
  };
  struct Left {
    std::string name;
    std::function<void()> put_in;
    bool is_number = false;
    bool holds_leaves = false;
  };
  struct Parts {
    int64_t count = 0;
    int64_t rows = 0;
    Rows last;
    std::map<std::string, Met> numbers;
    std::map<std::string, std::string> objects;  ///< described, where forward reads what is apart
    std::set<std::string> of_first;              ///< names of objects that the first one changed
    std::map<std::string, Added> added;          ///< to dicts
    std::map<std::string, std::vector<at::Tensor>> made;  ///< parameters
    /// All that the first one left, where it made leaves that get gradients.
    std::vector<Left> left_with_leaves;
  };
  /// One run of an experiment.
  struct Run;
  using RunFrom = std::function<Run(const std::function<void()>& prepare, Rows rows)>;
  /// Nothing where forward cannot run on that state.
  using TryFrom =
      std::function<std::optional<Run>(const std::function<void()>& prepare, Rows rows)>;
  using Kind = PlainNumbers::Kind;

  void put_back() const;
  /// Whether a parameter that the first part made is the one of all parts.
  bool leaves_stay() const;
  bool stays(const Left& left) const;
  [[noreturn]] void refuse_leaves() const;
  void note_remade(const PlainState& now) const;
  void note_move() const;
  /// \throws Unsupported where forward has moved what cannot be put back
  void check_can_put_back() const;
  void meet_left(Rows rows);
  void meet_leaves();
  void check_left();
  void experiment(int64_t total, const std::function<Batch(Rows)>& run, const RunFrom& run_from,
                  const TryFrom& try_from, const PlainState& now);
  void learn_kinds(const std::vector<PlainNumber>& numbers, const std::set<std::string>& accumulate,
                   const Run& first, Rows other, int64_t total, const RunFrom& run_from);
  /// \throws CouplingError where outputs depend on this number
  void check_unread(const PlainNumber& number, Rows first, const Batch& wanted,
                    const std::function<Batch(Rows)>& run, const PlainState& now) const;

  PlainNumbers own_;
  PlainNumbers* known_;
  PlainLook look_;
  PlainState base_;
  bool begun_ = false;
  bool changed_ = false;
  bool asks_ = true;  // no experiment has failed
  int64_t asked_at_ = 0;
  std::vector<PlainNumber> moved_;     // by the last forward
  std::vector<PlainObject> replaced_;  // by it, and no numbers
  Parts parts_;
  Remade remade_;
  bool found_ = false;
};

}  // namespace infinitybatch
