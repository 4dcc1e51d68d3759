#pragma once

#include <infinitybatch/autograd/gradient_sinks.hpp>
#include <infinitybatch/coupled/coupling_watch.hpp>
#include <infinitybatch/execute/buffer_rule.hpp>
#include <infinitybatch/execute/carried_state.hpp>
#include <infinitybatch/execute/cut_pass.hpp>
#include <infinitybatch/execute/denominator.hpp>
#include <infinitybatch/execute/fewest_rows.hpp>
#include <infinitybatch/execute/job.hpp>
#include <infinitybatch/execute/loss_state.hpp>
#include <infinitybatch/execute/loss_total.hpp>
#include <infinitybatch/execute/mixing_experiment.hpp>
#include <infinitybatch/execute/output_law.hpp>
#include <infinitybatch/execute/parameter_rule.hpp>
#include <infinitybatch/execute/pass_times.hpp>
#include <infinitybatch/execute/plan.hpp>
#include <infinitybatch/execute/row_look.hpp>
#include <infinitybatch/execute/source_watch.hpp>
#include <infinitybatch/execute/two_pass.hpp>

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace infinitybatch {

/// Runs instructions over one logical batch. Until `hand_out` nothing outside of it has changed but
/// random state and, between `load` and `free`, buffers; `roll_back` undoes these.
class Executor {
 public:
  explicit Executor(const Job& job);
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  /// \param rows the micro-batch's rows; ignored where the instruction is for the whole batch
  /// \throws CouplingError from `forward`, `record`, `retain` and `hand_out` where samples are
  /// coupled
  void run(const Instruction& instruction, Rows rows);

  /// Whether ordinary ops mix samples, as soon as a micro-batch has been recorded for it; comes by
  /// itself in front of the hand-out. Between micro-batches only. \throws CouplingError
  void examine();
  /// Whether the same rows, split otherwise, give the same rows of outputs, in steps 1, 2, 4, 8,
  /// ... of a kind of batch and where it is smaller. Comes by itself in front of the hand-out; with
  /// `Job::outside` call it once the outputs are there. What it finds is thrown by the hand-out or
  /// `finish_forward`, where nothing else says more.
  void look_at_rows();
  bool looked() const noexcept { return looked_; }
  /// The peak of this step, if it has looked at rows on the CPU, but for the look.
  std::optional<int64_t> peak_without_look() const {
    return looked_ && high_water_ ? std::optional(high_water_->peak()) : std::nullopt;
  }

  /// Whether a recording of another number of rows would tell more, until `examine`.
  bool wants_other_rows() const { return experiment_.may_count().has_value(); }

  /// Buffers and rewritten weights as the step found them.
  void roll_back();

  /// With `Job::outside`, once the outputs are there: buffers get what the forward of the whole
  /// batch leaves in them, and the parameters' gradients go to the sinks no more.
  /// \throws CouplingError naming a buffer on which micro-batches do not agree
  void finish_forward();
  /// Then, in front of the rest of the plan; uninstall the sinks after it.
  /// \param keep the rest may run once more
  void begin_backward(bool keep);

  /// The whole batch's loss, detached, in the loss's own type. Once `hand_out` has run neither this
  /// nor `take_outputs` can fail any more.
  at::Tensor loss() const;
  /// All outputs in order, with `keep_outputs`.
  std::optional<Batch> take_outputs();
  autograd::GradientSinks& sinks() noexcept { return sinks_; }
  /// How long the samples were that were loaded since the last call, each length once; empty where
  /// the sources promise that all are alike.
  std::vector<Dims> take_lengths() { return std::exchange(lengths_, {}); }
  /// With `Job::store`: what instructions took so far.
  const PassTimes& times() const noexcept { return times_; }
  /// And forgets that.
  PassTimes take_times() { return std::exchange(times_, {}); }
  /// Of graphs that were offloaded.
  GraphBytes graph_bytes() const { return two_pass_ ? two_pass_->graph_bytes() : GraphBytes(); }
  /// Whether forward has changed its inputs in place.
  bool wrote_inputs() const noexcept { return wrote_inputs_; }
  /// Somebody asks for `failed_rows`: what fails runs once more.
  void look_for_few_rows() noexcept {
    few_.look(job_.batch_size());
    few_for_loss_.look(job_.batch_size());
  }
  /// Samples of the micro-batch that were too few for forward, or for a loss of micro-batches,
  /// which failed; 0 where that is not why.
  int64_t failed_rows() const noexcept { return std::max(few_.failed(), few_for_loss_.failed()); }
  /// Whether the loss of all outputs is at work, or failed.
  bool in_whole_loss() const noexcept { return in_whole_loss_; }
  /// Whether samples are coupled by what no cut can answer: what forward leaves in buffers,
  /// parameters and attributes, or ordinary ops.
  bool coupled_beyond_cuts() const noexcept {
    return apart_ || rows_differ_ || state_.found() || experiment_.found();
  }
  /// What forwards of parts of the batch left in attributes.
  const LeftTensors& left() const noexcept { return state_.left(); }
  /// How many segments the model's tapes are cut into; with `Job::cut`, after the first `record`.
  int64_t segments() const { return cut_pass_ ? cut_pass_->segments() : 1; }
  /// Of one micro-batch, with `Job::checkpoints`, between its `record` and its last `backward`.
  int64_t segments(Rows rows) const { return cut_pass_->segments(rows); }
  Stretches stretches(Rows rows) const { return cut_pass_->stretches(rows); }
  /// One micro-batch's recording, with cuts, once it is recorded.
  const tape::Tape& tape(Rows rows) const { return cut_pass_->tape(rows); }
  /// By which operation a loss of all outputs talked to other ranks; nothing where it did not.
  std::optional<std::string> collective() const;
  /// Why the user's forward ran twice for some rows; nothing where it did not.
  std::optional<std::string> opaque() const;

 private:
  void perform(const Instruction& instruction, Rows rows);
  void perform_and_time(const Instruction& instruction, Rows rows);
  /// \param last no other micro-batch of this step comes
  void examine(bool last);
  void load(Rows rows);
  Batch load_inputs(Rows rows);
  void stream(Rows rows);
  /// Of a recording, what tells whether ordinary ops mix samples or count them.
  void look_at(Rows rows, const Batch& inputs, const tape::Tape& tape, const Batch& outputs);
  void forward(Rows rows);
  void loss(Rows rows);
  void backward(Rows rows, int64_t segment);
  void record(Rows rows, bool retain);
  void whole_loss();
  void replay(Rows rows);
  void record_for_cuts(Rows rows);
  /// How outputs follow the samples, after the first micro-batch's recording, where it is not known
  /// yet. May run forward on a few other rows, and undoes that.
  /// \param inputs  that it ran on
  /// \param outputs that it gave, detached
  /// \throws BatchError naming an output that cannot be joined
  void learn_outputs(Rows rows, const Batch& inputs, const Batch& outputs, const tape::Tape& tape);
  OutputForm form_elsewhere(Rows rows, at::Device device);
  void advance(Rows rows, int64_t segment, bool retain);
  void resume(Rows rows, int64_t segment);
  void load_for(Rows rows, int64_t segment);
  void seed();
  void release();
  bool is_last(Rows rows, int64_t segment) const;
  Batch call_model(Rows rows);
  /// Runs forward for something that does not count: what it leaves in Python is undone.
  /// \param as_first it finds the numbers that the first forward of the batch found
  Batch uncounted(const std::function<Batch()>& forward, bool as_first = true);
  void free();
  void penalty();
  void hand_out();
  void finish();
  void check_coupling(Rows rows) const;
  /// Runs forward on another number of rows, where rows are looked at for the first time and
  /// forward writes buffers: one that counts samples is left alike by micro-batches of one length.
  void recount(const std::function<Batch(Rows)>& load);
  /// The same in the first step of a kind of batch, where an op's number may count samples.
  void count_rows();
  /// Whether forward reads numbers in Python that it changes, in front of the second micro-batch:
  /// it runs on the first one's rows again, and on some of them, and all that is undone.
  /// \param any whatever the first forward has changed in Python, numbers or not
  void learn_numbers(bool any = false);
  void compare_rows();
  std::optional<TrialOutputs> try_forward(const Batch& inputs, int64_t rows);
  std::optional<std::vector<at::Tensor>> try_gradients(const Batch& inputs, Rows rows,
                                                       const std::vector<int64_t>& dims,
                                                       const std::vector<bool>& compared);
  void note_own_backward();
  /// Which outputs a separable loss reads, as far as its graph shows.
  void note_read();
  /// Runs forward on other rows and undoes it: buffers, parameters, attributes of modules and
  /// random state are as before, whatever happens.
  /// \param trial whether what it writes into parameters is not compared with what others write
  void aside(bool trial, const std::function<void()>& forward);
  /// Runs forward on other rows, records and undoes it: buffers, parameters, attributes of modules
  /// and random state are as before, whatever happens.
  /// \param use what it ran on, what it did, what it gave
  void record_elsewhere(
      Rows rows,
      const std::function<void(const Batch& inputs, const tape::Tape&, const Batch& outputs)>& use);
  void commit();
  /// Runs the loss. \throws CouplingError where it draws random numbers for these rows alone, with
  /// `Job::match_native_rng`
  at::Tensor loss_sum(Rows rows) const;
  /// \param except leaves whose gradients do not belong to the sinks
  void differentiate(const at::Tensor& share, const std::vector<at::Tensor>& except = {});
  /// Of one output leaf of these rows, with cuts and a loss of all outputs.
  at::Tensor gradient_of(Rows rows, size_t leaf, const at::Tensor& output);
  /// With `Job::store`: what waits of these rows, at cuts and of the outputs. Bytes whose copies
  /// begin.
  int64_t fetch(Rows rows, int64_t segment, bool back, bool ahead);
  int64_t leave(Rows rows, int64_t segment);
  int64_t offload(Rows rows, int64_t segment, bool back);
  /// With cuts, of a coupled loss's outputs; null where none wait in front of or behind this
  /// segment.
  WholeOutputs* outputs_at(Rows rows, int64_t segment);

  const Job& job_;
  autograd::GradientSinks sinks_;
  BufferRule buffers_;
  coupled::CouplingWatch watch_;
  std::optional<ParameterRule> parameters_;  // once the watch knows them
  CarriedState state_;
  CarriedState* state_at_work_ = &state_;  // another one's where forward is tried on other rows
  LossState loss_state_;
  MixingExperiment experiment_;
  SourceWatch sources_;
  Rows first_;                        // of the first micro-batch
  bool uneven_ = false;               // another one was of another length
  int64_t smallest_ = 0;              // rows of the step's own micro-batches
  std::vector<bool> read_;            // outputs, by a separable loss; empty: not known
  std::optional<bool> own_backward_;  // whether going back runs code of the user's
  bool looked_ = false;               // at rows
  bool rows_differ_ = false;
  std::exception_ptr differ_;                    // then: how
  std::optional<memory::HighWater> high_water_;  // of this step, where rows will be looked at
  bool apart_ = false;                           // what forwards left did not agree
  bool learning_ = false;                        // numbers: runs that do not count
  std::optional<Denominator> denominator_;       // of a separable loss
  std::optional<std::string> foreign_draw_;      // with `Job::match_native_rng`: who gave numbers
  FewestRows few_;
  FewestRows few_for_loss_;
  bool wrote_inputs_ = false;
  bool in_whole_loss_ = false;
  bool loss_known_ = false;                    // of all outputs
  std::optional<TwoPass> two_pass_;            // for a coupled loss
  std::optional<CutPass> cut_pass_;            // with `Job::cut`, for any loss
  std::optional<WholeOutputs> whole_outputs_;  // then, for a coupled loss
  std::vector<at::Tensor> seeds_;  // then, while measuring, in place of the outputs' gradient

  PassTimes times_;
  int64_t copied_bytes_ = 0;  // whose copies the instruction at work began

  std::vector<Dims> lengths_;
  Batch inputs_;  // of the micro-batch at work
  Batch targets_;
  Batch outputs_;
  at::Tensor share_;

  LossTotal total_;
  std::vector<Batch> kept_;  // outputs, with `keep_outputs`
  std::vector<int64_t> kept_rows_;
  at::Tensor final_loss_;  // what `loss` and `take_outputs` give, made before the hand-out
  std::optional<Batch> final_outputs_;
};

}  // namespace infinitybatch
