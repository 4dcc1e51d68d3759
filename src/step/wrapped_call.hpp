#pragma once

#include "autograd/gradient_sinks.hpp"
#include "core/rng.hpp"
#include "coupled/renormed_weights.hpp"
#include "execute/buffer_values.hpp"
#include "execute/graph_memory.hpp"
#include "execute/plain_runs.hpp"
#include "execute/static_tapes.hpp"
#include "memory/foreign_storage.hpp"
#include "memory/high_water.hpp"
#include "plan/planner.hpp"
#include "step/graph_choice.hpp"
#include "step/knowledge.hpp"
#include "step/left_behind.hpp"
#include "step/left_outputs.hpp"
#include "step/offload.hpp"
#include "step/programs.hpp"
#include "step/sequence_inputs.hpp"
#include "step/wrap_outputs.hpp"
#include "tape/modes.hpp"
#include "tape/tape.hpp"

#include <infinitybatch/step/wrap.hpp>

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace infinitybatch {

/// With static_graph: what later calls with one kind of batch need not ask forward for.
struct StaticForward {
  StaticTapes tapes;
  std::vector<bool> wants_gradient;    ///< of each leaf of the outputs
  std::vector<NamedParameter> leaves;  ///< that get a gradient and are no parameters
  bool ambiguous = false;              ///< along which dimension outputs lie
  std::vector<LeftOutputs::Entry> left;
};

/// What others need between forward and backward of a call that waits.
struct RoomAskedFor {
  Plan plan;           ///< of that call
  uint64_t begun = 0;  ///< its number, `Wrapped::begun`
  int64_t bytes = 0;   ///< above what was live when its forward ended
};

/// What calls of one Wrap share with their graph nodes, which may outlive it.
struct Wrapped {
  Model model;
  Options options;
  WrapOptions own;  ///< what only a Wrap has
  /// Of tensors with a graph that forward leaves in attributes: a loss goes back through them; or
  /// backward has begun, and none did.
  std::atomic<bool> left_read = false;
  std::atomic<bool> holds_wrapped = false;  ///< forward calls a wrapped part
  std::atomic<bool> left_unread = false;
  std::atomic<bool> went_back = false;  ///< some call's backward has been there
  std::atomic<bool> joining = false;    ///< tensors that forward left, in this call
  std::atomic<bool> joins_left = true;  ///< what forward leaves, until it has been seen not to work
  /// How often memory has run out where it was joined, and calls since then without it; 0 and 0
  /// where it did not work for another reason.
  std::atomic<int64_t> join_shortages = 0;
  std::atomic<int64_t> calls_unjoined = 0;
  std::atomic<bool> use_tapes = true;  ///< false where the option says so, or a replay differed
  /// Whether ops of the model see the whole batch, in eval and in training mode.
  std::array<std::atomic<bool>, 2> cut{};
  std::atomic<bool>& sees_whole_batch() { return cut[model.is_training() ? 1 : 0]; }

  // With a memory budget:
  std::atomic<bool> planning = false;  ///< one thread at a time asks the planners
  /// One for each call of a step, as far as they are told apart: the first of two calls has the
  /// second one between its forward and its backward.
  static constexpr size_t kCalls = 4;
  std::array<Planner, kCalls> planners;
  std::array<uint64_t, kCalls> begun{};  ///< counts what each planner was asked
  std::array<GraphChoices, kCalls> graph_choices;
  Planner without_gradients;
  int64_t segments = 1;  ///< of the cut tapes that were recorded last

  std::mutex mutex;                                                ///< over what follows
  std::array<std::optional<RoomAskedFor>, kCalls> asked_for_room;  ///< of calls that wait
  std::shared_ptr<WrapReport> report;                              ///< of the last call
  KnowledgeBase known;
  std::map<std::string, StaticForward> static_forwards;
  Programs programs;
  std::vector<NodeRange> recorded;        ///< with static_graph: by calls that ran forward
  PlainNumbers numbers;                   ///< in Python; guarded by itself
  std::shared_ptr<offload::Store> store;  ///< where that goes; made when it is first needed

  /// A copy for one call, and what it has become.
  Findings findings_of(const BatchKind& kind);
  void keep(const BatchKind& kind, const Findings& findings);

  /// What is known of forwards with this kind of batch, and with these parameters and buffers.
  StaticForward static_forward_of(const Problem& problem, const std::string& kind);
  void keep_static_forward(const std::string& kind, StaticForward known);

  /// The number of the program that forward is set to run, and how forward has left the model.
  /// \param arguments `BatchSource::arguments`
  int64_t begin_program(const std::string& arguments);
  void end_program(const std::string& arguments);
  /// With `static_graph` attributes keep what a recording left there.
  void note_recorded(const NodeRange& nodes);
  /// The store for tensors of `device`.
  std::shared_ptr<offload::Store> store_on(at::Device device);
  SequenceInputs sequences;           ///< with `trim`; guarded by itself
  std::atomic<bool> copying = false;  ///< one thread at a time uses it
  std::thread::id worker;             ///< who calls it or runs backward through it, under `mutex`
  int calls_at_work = 0;              ///< of that thread, one inside of the other
};

/// While it lives this thread alone calls a wrapped model, or runs backward through it: meanwhile
/// parameters have other accumulators, which another thread's backward would find.
class OneThread {
 public:
  /// \throws StateError where another thread is at work
  explicit OneThread(Wrapped& wrapped);
  ~OneThread();
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  Wrapped& wrapped_;
};

/// While it lives this thread alone uses the store of a wrapped model.
class StoreUse {
 public:
  /// \param store null where nothing is offloaded
  /// \throws StateError where another thread does
  StoreUse(Wrapped& wrapped, const offload::Store* store);
  ~StoreUse();
  StoreUse(const StoreUse&) = delete;
  StoreUse& operator=(const StoreUse&) = delete;

 private:
  Wrapped* wrapped_ = nullptr;
};

/// A tensor and its version when it was read.
struct Version {
  std::string what;
  at::Tensor tensor;
  uint32_t version = 0;

  static Version of(std::string what, const at::Tensor& tensor);
  bool holds() const;
  /// \throws StateError where the tensor has been changed in place since
  void check() const;
};

class WrapRun;

/// Everything that the backward pass of one call needs to know of its forward pass.
struct WrappedCall {
  WrappedCall();
  ~WrappedCall();
  WrappedCall(const WrappedCall&) = delete;
  WrappedCall& operator=(const WrappedCall&) = delete;

  std::shared_ptr<Wrapped> wrapped;
  at::Device device = at::kCPU;
  std::vector<at::Device> devices;           ///< whose random generators are at work
  std::shared_ptr<const Trimming> trimming;  ///< null where rows are as the caller gave them
  Batch inputs;                              ///< detached
  std::vector<size_t> wanted_inputs;         ///< leaves of `inputs` that require grad
  std::vector<NamedParameter> leaves;        ///< parameters and other leaves that get a gradient
  std::vector<std::pair<at::Tensor, bool>> requires_grad;  ///< of every parameter
  std::vector<Version> parameter_versions;
  std::vector<Version> input_versions;
  BatchKind kind;
  Findings findings;  ///< about it; kept once forward has succeeded
  std::vector<BufferSlot> buffers;
  std::shared_ptr<PlainRuns> runs;  ///< where some forward runs again, and it left anything
  std::shared_ptr<coupled::RenormedWeights> renormed;  ///< null where forward scaled no rows
  std::vector<std::string> left_on_module;             ///< see WrapReport
  NodeRange nodes;                                     ///< that forward made
  tape::Modes modes;
  JoinedOutputs outputs;                 ///< tensors detached; they share memory with the caller's
  std::vector<Version> output_versions;  ///< for each leaf of `outputs`
  std::vector<int> gradient_of_output;   ///< which of the node's inputs a leaf is; -1 for none

  std::shared_ptr<offload::Store> store;  ///< where kept graphs wait; null where they do not leave
  OffloadedMeanwhile offloaded;           ///< so far
  GraphBytes graph_bytes;

  // With a memory budget:
  std::optional<int64_t> budget;                                             ///< in bytes
  Piece piece;                                                               ///< what was planned
  bool is_planned() const { return !piece.plan.micro_batch_sizes.empty(); }  ///< no size was given
  size_t planner = 0;
  uint64_t begun = 0;
  int64_t place = 0;  ///< among `WaitingCalls`
  std::shared_ptr<WrapReport> report;
  std::unique_ptr<memory::ForeignStorages> counted;
  std::unique_ptr<memory::HighWater> high_water;   ///< from the beginning of forward on
  std::unique_ptr<memory::HighWater> during_loss;  ///< from the last micro-batch on
  int64_t live_before_loss = 0;
  std::atomic<bool> differentiated = false;  ///< backward has begun at least once
  /// Where forward left tensors with a graph in attributes: whether backward of this node is at
  /// work; it is told to whoever outlives the call.
  std::shared_ptr<std::atomic<bool>> going_back;

  /// Whether forward, or backward of its node, is at work: told to whoever outlives the call.
  const std::shared_ptr<std::atomic<bool>> at_work = std::make_shared<std::atomic<bool>>(true);

  /// One micro-batch of the inputs: leaves of a graph of its own.
  Batch micro_batch(Rows part) const;

  /// Whether forward made this node, and not the caller of what he does with the outputs.
  bool made(const torch::autograd::Node& node) const;
  /// The copies of a stretch of the call are over: its report tells of them.
  void add_offloaded(const OffloadedMeanwhile& copies);

  /// What forward has run, and backward runs. The last member: it refers to the others.
  std::unique_ptr<WrapRun> run;
};

/// Bytes that what forward leaves beside its outputs may take, joined.
int64_t room_for_left(const Wrapped& wrapped, at::Device device);

/// Calls that record the same program where forward depends on shapes only.
/// \param wanted_inputs leaves of the inputs that want a gradient
/// \param recording     whether anything does
std::string kind_of_forward(const BatchKind& kind, const Problem& problem,
                            const std::vector<size_t>& wanted_inputs, bool recording);

/// Gradients of `leaves`, then of `wanted_inputs`, from those of the outputs.
/// \param gradients for each of the node's inputs, undefined where none came
std::vector<at::Tensor> backward(WrappedCall& call, const std::vector<at::Tensor>& gradients);

/// Gives the outputs that want a gradient one graph node for all, which holds `call`.
/// \param inputs with their graph
/// \param wanted which leaves of the outputs want a gradient
void attach_node(const std::shared_ptr<WrappedCall>& call, const Batch& inputs,
                 const std::vector<bool>& wanted, Batch& outputs);

}  // namespace infinitybatch
