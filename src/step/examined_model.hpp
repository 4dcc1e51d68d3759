#pragma once

#include "core/callback_errors.hpp"
#include "core/rng.hpp"
#include "core/torch_compat.hpp"
#include "coupled/coupling_watch.hpp"
#include "coupled/original_weights.hpp"
#include "execute/buffer_values.hpp"
#include "execute/carried_state.hpp"
#include "execute/problem.hpp"
#include "tape/op_bus.hpp"

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace infinitybatch {

/// Keeps what parameters held in front of the first op that writes into them, for whoever runs
/// whole steps and has to leave no trace of them.
class ParameterWrites final : public tape::OpListener {
 public:
  explicit ParameterWrites(const std::vector<NamedParameter>& parameters);
  /// Puts it back.
  void undo() const { memory_.undo(); }
  /// \throws what went wrong while it listened: a write may have been missed
  void rethrow() { errors_.rethrow(); }
  /// Values of one that has been written; undefined of others.
  at::Tensor before(const at::Tensor& parameter) const;

 private:
  std::unique_ptr<tape::OpContext> begin(const tape::SeenOp& op) noexcept override;

  coupled::WatchedMemory memory_;
  CallbackErrors errors_;
};

/// A model while `verify` looks at it: each look starts from the same parameters, buffers, random
/// state and empty `.grad`, in fp64 on demand, and in the end everything is as it was. Forward may
/// put others into the places of parameters and buffers, or some where there were none.
class ExaminedModel {
 public:
  /// \param problem admitted already
  explicit ExaminedModel(const Problem& problem);
  ~ExaminedModel();
  ExaminedModel(const ExaminedModel&) = delete;
  ExaminedModel& operator=(const ExaminedModel&) = delete;

  /// Parameters and buffers in fp64 from now on.
  void turn_to_double();
  /// The model's own forward. What it does to parameters is undone by `reset`.
  Batch forward(const Batch& inputs);
  /// The same of a step of somebody else's.
  void watch(const std::function<void()>& step);
  /// Parameters, buffers, Python's and random state as in the beginning, no `.grad`.
  void reset();
  /// What stands in `.grad` of the parameters that the model has now; undefined where there is
  /// none.
  std::vector<NamedParameter> take_gradients();
  /// What buffers hold now, and parameters that are not what they were, in fp64.
  std::vector<NamedParameter> read_values() const;

 private:
  struct Kept {
    std::string name;
    at::Tensor tensor;
    at::Tensor data;  // the same memory under another tensor
    at::Tensor now;   // that, or what stands in its place in fp64
    at::Tensor grad;
    compat::NodePtr accumulator;
  };

  void begin_watch();
  void put_back_parameters();
  /// Whether the model's parameter of this name is another now, or holds other values.
  bool is_other(const NamedParameter& parameter) const;

  const Problem& problem_;
  coupled::OriginalWeights weights_;
  std::optional<coupled::CouplingWatch> watch_;
  std::optional<ParameterWrites> writes_;
  coupled::WatchedMemory memory_;
  CarriedState state_{memory_};
  RngSnapshot random_;
  std::vector<Kept> parameters_;
  std::vector<Kept> buffers_;
  BufferValues values_;  // of those
  bool in_double_ = false;
};

/// Floating tensors in fp64, complex ones in complex fp64.
at::Tensor to_double(const at::Tensor& tensor);
Batch to_double(const Batch& batch);

}  // namespace infinitybatch
