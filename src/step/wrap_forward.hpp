#pragma once

#include "wrapped_call.hpp"

#include <infinitybatch/coupled/coupling_watch.hpp>
#include <infinitybatch/coupled/part_of_batch.hpp>
#include <infinitybatch/execute/buffer_rule.hpp>
#include <infinitybatch/execute/carried_state.hpp>
#include <infinitybatch/execute/fewest_rows.hpp>
#include <infinitybatch/execute/mixing_experiment.hpp>
#include <infinitybatch/execute/parameter_rule.hpp>
#include <infinitybatch/execute/row_look.hpp>

#include <functional>
#include <memory>
#include <optional>
#include <unordered_set>
#include <vector>

namespace infinitybatch {

/// How one forward pass is split.
struct Split {
  std::vector<int64_t> sizes;
  int64_t retained = 0;   ///< of the last micro-batches: keep their graph, beside the tape
  bool overlaps = false;  ///< where graphs are offloaded: copied while other micro-batches compute
};

/// Inputs that a forward may have to run on again.
class Rerunnable {
 public:
  explicit Rerunnable(const Batch& inputs);
  /// \throws Unsupported where they have been changed in place
  void check() const;
  bool holds() const;

 private:
  std::vector<Version> versions_;
};

/// One forward pass over all micro-batches of a wrapped model.
class ForwardPass {
 public:
  ForwardPass(std::shared_ptr<Wrapped> wrapped, const Job& job, const Batch& inputs);
  ForwardPass(const ForwardPass&) = delete;
  ForwardPass& operator=(const ForwardPass&) = delete;

  /// All micro-batches, and the outputs of all.
  Batch run(const Split& split, int64_t total);
  /// The same for a model with ops that see the whole batch.
  /// \param overlap  what is offloaded is copied while other micro-batches compute
  /// \param segments that it was planned for
  /// \throws NothingToCut where there are none
  /// \throws SegmentsChanged where there are more or fewer than planned
  Batch run_cuts(std::vector<int64_t> sizes, bool overlap,
                 std::optional<int64_t> segments = std::nullopt);

  /// One micro-batch: `finish` comes after the last.
  void run(Rows rows, int64_t total, bool keep = false);
  /// Whether all micro-batches were of one length until now, and one of another would tell along
  /// which dimension outputs lie, which of them stand once, or which buffers count samples.
  bool wants_another_size() const;
  /// The outputs of all, with their node where they want a gradient.
  Batch finish();
  /// Whether micro-batches are joined; running out of memory then is no matter of their size.
  bool finishing() const noexcept { return finishing_; }
  int64_t failed_rows() const noexcept { return few_.failed(); }
  /// Whether an op that couples samples has run for which somebody can stand in, or one that draws
  /// numbers which are to be those of the whole batch.
  bool saw_coupling() const;

  /// Buffers, rewritten weights and random state as the pass found them.
  void roll_back();

  /// Whether this forward has compared rows.
  bool looked() const noexcept;
  /// What tells the planner how much the call needs: looks at other rows are no part of that.
  void measured_by(const memory::HighWater& mark) noexcept { planners_mark_ = &mark; }

  const std::shared_ptr<WrappedCall>& call() const noexcept { return call_; }
  const std::vector<int64_t>& sizes() const noexcept { return row_counts_; }

 private:
  void read(const Batch& inputs);
  void read(const NamedParameter& parameter);
  /// Whether ordinary ops of the model mix samples. \throws CouplingError
  void examine();
  /// Runs forward on other rows, and undoes that: buffers, parameters, attributes of modules and
  /// random state are as before, whatever happens.
  /// \param trial whether what it writes into parameters is not compared with what others write
  void aside(Rows rows, bool trial, const std::function<void()>& forward);
  /// What forward gives with `coupled::FixedOps`. Nothing where that cannot be compared.
  std::optional<TrialOutputs> try_forward(const Batch& given, int64_t rows);
  std::optional<std::vector<at::Tensor>> try_gradients(const Batch& given, Rows rows,
                                                       const std::vector<int64_t>& dims);
  /// Whether the same rows, split otherwise, give the same rows of outputs; see RowLook.
  /// \throws CouplingError
  void look_at_rows();
  /// Runs forward on two samples where buffers were written in micro-batches of one, which leave
  /// equal counts of samples in them: `buffer_rule_` compares.
  void recount();
  /// Whether an output that is one number is the sum or mean over samples that the user says: once
  /// for each kind of batch. \throws BatchError
  void check_reduce(const JoinedOutputs& joined);
  /// Where an op's number may count samples: runs forward on other rows, and undoes that.
  void count_rows();
  /// Whether forward reads numbers in Python that it changes, by experiment on the first rows.
  void learn_numbers(int64_t first);
  void note_examined() const;
  /// \param memory where its graph will be offloaded: notes what it keeps; else null
  Batch call_model(const Batch& micro, GraphMemory* memory);
  /// The user's forward; with what it leaves beside its outputs behind them.
  Batch run_model(const Batch& micro);
  Batch without_left(Batch outputs, bool keep = false);
  void hand_out_left(const Batch& outputs);
  void learn_from_recording(const Batch& outputs, const Batch& micro, uint64_t first_node);
  /// The same, in a graph that ends in sinks of its own.
  Batch call_model_and_keep(const Batch& micro, GraphMemory* memory);
  /// With `Job::offloads_graphs`: the graph of this part begins to leave, what left before it is
  /// away.
  void leave(size_t part);
  void settle();
  /// \param dropped nobody but whoever kept a tensor of it goes back through this graph
  void note_graph(const Batch& outputs, const Batch& micro, uint64_t first_node, bool dropped,
                  bool kept = false);
  /// Where forward left tensors with a graph in attributes: whether a graph of the outputs can be
  /// kept beside them, which backward would use up under a loss that reads both.
  bool may_keep_beside(const std::vector<at::Tensor>& left);
  /// Which outputs come from the samples, as far as this recording tells.
  void note_sources(const tape::Tape& tape);
  /// Whether that of further micro-batches matters.
  bool may_stand_once() const;
  /// Whether a buffer may count samples, which micro-batches of one length do not tell.

  const WrapOptions& options_;
  const bool exact_;
  const bool recording_;
  std::shared_ptr<WrappedCall> call_;
  BufferRule buffer_rule_;
  coupled::CouplingWatch watch_;
  bool drew_ = false;                            // numbers that are to be the whole batch's
  std::optional<ParameterRule> parameter_rule_;  // once the watch knows them
  std::optional<CarriedState> state_;
  CarriedState* state_at_work_ = nullptr;  // another one's where forward is tried on other rows
  BatchSource rows_;                       // the inputs
  bool known_ = true;                      // before this call, whether ops mix samples
  std::optional<MixingExperiment> experiment_;
  std::optional<bool> own_backward_;  // whether going back runs code of the user's
  std::optional<memory::HighWater> high_water_;
  bool looked_ = false;  // at rows
  const memory::HighWater* planners_mark_ = nullptr;
  bool part_ = false;  // the micro-batch at work is not all of the samples
  FewestRows few_;
  bool wrote_inputs_ = false;
  bool keeps_ = true;  // the graph of the micro-batch at work may be kept
  std::vector<at::Tensor> buffers_;
  std::shared_ptr<const BufferValues> values_;
  RngSnapshot before_;
  std::unordered_set<c10::TensorImpl*> known_leaves_;
  size_t parameters_ = 0;  // among the call's leaves, the first ones
  const Job& job_;
  std::vector<Batch> outputs_;
  std::vector<int64_t> row_counts_;
  std::vector<bool> wants_gradient_;  // of each leaf of the outputs
  std::vector<bool> from_samples_;    // the same; empty where nothing was recorded
  std::optional<size_t> leaving_;     // the part whose graph is on its way
  // What the node's edges need; the call itself holds inputs without their graph.
  Batch inputs_;
  std::optional<coupled::PartOfBatch::Facts> part_of_batch_;  // the micro-batch at work
  bool ambiguous_ = false;  // along which dimension the outputs of a recording lie
  bool finishing_ = false;
  std::optional<LeftOutputs> left_;  // none where nobody looks, or it does not work
};

}  // namespace infinitybatch
