#pragma once

#include "core/callback_errors.hpp"
#include "core/check.hpp"
#include "core/generator_state.hpp"
#include "coupled/renormed_weights.hpp"
#include "coupled/sample_means.hpp"
#include "coupled/watched_memory.hpp"
#include "tape/op_bus.hpp"

#include <infinitybatch/core/model.hpp>
#include <infinitybatch/coupled/across_batch.hpp>

#include <ATen/core/Generator.h>
#include <ATen/core/TensorBody.h>
#include <c10/util/flat_hash_map.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace infinitybatch::coupled {

/// An op that mixes the samples of a batch, as it was seen running.
struct CoupledOp {
  std::string op;   ///< "aten::batch_norm"
  std::string why;  ///< what it does to the samples, and the way out
};

/// Notices ops that couple samples: BatchNorm in training mode in any of its spellings, embeddings
/// with `scale_grad_by_freq`, which couple in backward alone, and with `max_norm`, where something
/// else reads the weight that they rewrite. `instance_norm`, which is computed by batch_norm over
/// each sample, is not one of them. Ops inside a compiled region are not dispatched one by one and
/// cannot be seen.
class CouplingWatch final : public tape::OpListener, public Check {
 public:
  CouplingWatch() : CouplingWatch(std::make_shared<RenormedWeights>()) {}
  explicit CouplingWatch(std::shared_ptr<RenormedWeights> renormed)
      : renormed_(std::move(renormed)) {}

  /// Watches the ops of this thread while it lives. Scopes may nest; the innermost sees.
  class Scope {
   public:
    explicit Scope(CouplingWatch& watch);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const tape::OpBus::Scope listening_;
  };

  /// Whether one watches this thread.
  static bool at_work() noexcept { return tape::OpBus::listener<CouplingWatch>() != nullptr; }

  /// Call it when ops have run, before anything that the watch says is believed.
  /// \throws what went wrong while it watched (out of memory): it may have missed an op
  /// After a forward that has failed and been undone: what callbacks could not do was of that one.
  void forget_errors() noexcept {
    errors_.forget();
    renormed_->forget_errors();
  }
  void rethrow() {
    errors_.rethrow();
    renormed_->rethrow();
  }

  /// Coupled ops so far, in order; what one of them calls is not counted again.
  const std::vector<CoupledOp>& seen() const noexcept { return seen_; }
  /// The first of them.
  std::optional<CoupledOp> found() const {
    return seen_.empty() ? std::nullopt : std::optional(seen_.front());
  }

  /// These are the model's, so a BatchNorm over one of them or a view of it (standardised weights)
  /// mixes no samples; writes into them are seen.
  void know_parameters(const std::vector<NamedParameter>& parameters);
  bool is_parameter(const c10::IValue& value) const;

  /// What ops do with the parameters, and with whatever else it is told of.
  WatchedMemory& memory() noexcept { return memory_; }

  /// Buffers that the forward watched last moved by a mean over its samples.
  std::vector<SampleMean> take_means() { return means_.take(); }

  /// From now on ops that draw random numbers are noticed too, from the default generators or from
  /// one that they are given.
  /// \param devices whose default generators there are, beside the CPU's
  void watch_draws(const std::vector<at::Device>& devices);
  /// The first op that drew.
  const std::optional<std::string>& drew() const noexcept { return drew_; }
  /// The first collective that ran: other ranks answer it once.
  const std::optional<std::string>& collective() const noexcept { return collective_; }
  /// Puts generators back that ops were given, as they were before the first time.
  void undo_draws() const;
  /// Values that ops wrote, weights that they scaled, generators that they drew from.
  void roll_back() override {
    memory_.undo();
    renormed_->undo();
    undo_draws();
  }
  void let_go() override { memory_.let_go(); }
  /// Those that ops were given so far stay where they are now: the function puts them back.
  std::function<void()> hold_draws() const;

  void forget() {
    seen_.clear();
    functions_.forget();
  }

  /// Nothing will be watched any more; watches that were made later may come to work.
  void close() { functions_.close(); }

  /// \throws CouplingError where a coupled op ran on `rows` of `total` samples, but not all of them
  void check(int64_t rows, int64_t total) const;

  /// Weights that an embedding's `max_norm` rewrites. Others may watch with the same.
  const std::shared_ptr<RenormedWeights>& renormed() const noexcept { return renormed_; }

 private:
  struct Inside;
  struct Renorming;
  struct Drawing;
  using Context = std::unique_ptr<tape::OpContext>;
  struct Stand {
    at::Generator generator;
    GeneratorState state;
  };
  static std::vector<Stand> stand_of(const std::vector<at::Generator>& generators);
  Context begin(const tape::SeenOp& op) noexcept override;
  void end(const tape::SeenOp& op, tape::OpContext* context) noexcept override;
  Context meet(const tape::SeenOp& op);
  void leave(tape::OpContext& context);
  /// \param op may draw
  Context on_draw(const tape::SeenOp& op);
  Context enter();
  Context on_renorm(const tape::SeenOp& op);
  void on_read(const tape::SeenOp& op);

  AcrossBatchFunctions functions_;
  WatchedMemory memory_;
  SampleMeans means_;
  ska::flat_hash_set<const c10::StorageImpl*> parameters_;
  std::vector<CoupledOp> seen_;
  std::shared_ptr<RenormedWeights> renormed_;
  int inside_ = 0;                         // ops whose inner ops are not looked at
  std::vector<at::Generator> generators_;  // the default ones, where draws are watched
  std::vector<Stand> given_;               // those that ops were given
  std::optional<std::string> drew_;
  std::optional<std::string> collective_;
  bool drawing_ = false;  // an op that may draw is at work
  CallbackErrors errors_;
};

}  // namespace infinitybatch::coupled
