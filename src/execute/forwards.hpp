#pragma once

#include "core/row_range.hpp"
#include "coupled/coupling_watch.hpp"
#include "execute/buffer_rule.hpp"
#include "execute/carried_state.hpp"
#include "execute/fewest_rows.hpp"
#include "execute/parameter_rule.hpp"
#include "execute/setup.hpp"
#include "execute/source_watch.hpp"
#include "tape/tape.hpp"

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace infinitybatch {

/// The user's forward during one logical batch: runs that count, under everybody who watches what
/// they write and leave, and runs on other rows that do not, which are undone.
class Forwards {
 public:
  /// \param release lets go of the graph at work, in front of what is undone
  Forwards(const Setup& setup, std::function<void()> release);
  Forwards(const Forwards&) = delete;
  Forwards& operator=(const Forwards&) = delete;

  // Of the micro-batch at work:
  Batch inputs;
  Batch targets;
  Batch outputs;

  void load(Rows rows);
  Batch load_inputs(Rows rows);
  void load_targets(Rows rows);
  /// The inputs of these rows, for somebody who only looks at them.
  Batch rows_again(Rows rows) const;
  /// An instruction is for these rows.
  void note_rows(Rows rows);
  /// Lets go of the micro-batch at work.
  void release();

  /// Fills `outputs`.
  void run(Rows rows);
  /// And takes them. \throws CouplingError where samples are coupled by an op that is known to
  Batch call(Rows rows);
  /// Whether this is so, of all runs up to now. \throws CouplingError
  void check_coupling(Rows rows);
  /// Runs forward for something that does not count: what it leaves in Python is undone.
  Batch uncounted(const std::function<Batch()>& forward);
  /// Whether forward reads numbers in Python that it changes, in front of the second micro-batch:
  /// it runs on the first one's rows again, and on some of them, and all that is undone.
  void learn_numbers();
  /// Whether forward runs for that.
  bool learning() const noexcept { return learning_; }
  /// Runs forward on other rows and undoes it: buffers, parameters, attributes of modules and
  /// random state are as before, whatever happens.
  /// \param trial whether what it writes into parameters is not compared with what others write
  void aside(bool trial, const std::function<void()>& forward);
  /// The same, recorded. \param use what it ran on, what it did, what it gave
  void record_elsewhere(
      Rows rows,
      const std::function<void(const Batch& inputs, const tape::Tape&, const Batch& outputs)>& use);

  /// Who watches what they leave.
  const std::vector<Check*>& checks() const noexcept { return checks_; }
  /// Of them, what micro-batches leave alike is written. \throws CouplingError naming what is not
  void commit();
  BufferRule& buffers() noexcept { return buffers_; }
  /// Rows beside the step's have run: what they have left has to be what micro-batches left.
  void end_other_rows() {
    parameters_->see_micro_batch();
    buffers_.end_other_rows();
  }
  /// Parameters that forward has written.
  std::vector<ParameterRule::Found> written_parameters() const { return parameters_->found(); }
  coupled::CouplingWatch& watch() noexcept { return watch_; }
  CarriedState& state() noexcept { return state_; }
  const CarriedState& state() const noexcept { return state_; }
  /// Whether what was restored could belong to graphs that are kept.
  bool restores() const { return buffers_.restores_memory() || parameters_->written(); }

  /// Rows of the first micro-batch.
  Rows first() const noexcept { return first_; }
  /// Whether another one was of another length.
  bool uneven() const noexcept { return uneven_; }
  /// Rows of the smallest one.
  int64_t smallest() const noexcept { return smallest_; }
  /// Whether forward has changed its inputs in place.
  bool wrote_inputs() const noexcept { return wrote_inputs_; }
  /// Whether what micro-batches left did not agree.
  bool apart() const noexcept { return apart_ || state_.found(); }
  /// Whether an op that couples samples has run for which somebody can stand in, or one that draws
  /// numbers which are to be those of the whole batch.
  bool saw_coupling() const;
  bool saw_across_batch() const;
  /// Whether going back runs code of the user's; nothing where it is not known.
  const std::optional<bool>& own_backward() const noexcept { return own_backward_; }
  /// Whether forward fails on a few samples.
  FewestRows& few() noexcept { return few_; }
  const FewestRows& few() const noexcept { return few_; }
  /// How long the samples were that were loaded since the last call, each length once; empty where
  /// the sources promise that all are alike.
  std::vector<Dims> take_lengths() { return std::exchange(lengths_, {}); }

 private:
  void note_own_backward();
  std::optional<std::string> why_no_collectives(Rows rows) const;
  void refuse_beside_trimming(bool wrote_inputs) const;

  const Problem& problem_;
  const Strategy& strategy_;
  const Resources& resources_;
  std::function<void()> release_;
  BufferRule buffers_;
  coupled::CouplingWatch watch_;
  std::optional<ParameterRule> parameters_;  // once the watch knows them
  CarriedState state_;
  CarriedState* state_at_work_ = &state_;  // another one's where forward is tried on other rows
  std::vector<Check*> checks_;
  SourceWatch sources_;
  FewestRows few_;
  Rows first_;
  bool uneven_ = false;
  int64_t smallest_ = 0;
  bool wrote_inputs_ = false;
  bool apart_ = false;
  bool learning_ = false;                    // numbers: runs that do not count
  bool drew_ = false;                        // numbers that are to be the whole batch's
  std::optional<std::string> foreign_draw_;  // with `Problem::match_native_rng`: who gave numbers
  std::optional<bool> own_backward_;
  std::vector<Dims> lengths_;
};

}  // namespace infinitybatch
