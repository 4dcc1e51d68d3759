#pragma once

#include <infinitybatch/core/batch.hpp>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace infinitybatch {

/// A parameter as the model names it.
struct NamedParameter {
  std::string name;
  at::Tensor tensor;
};

/// A place that holds a buffer. Models may write the buffer in place or put another tensor there.
struct BufferSlot {
  std::string name;
  std::function<at::Tensor()> get;
  std::function<void(const at::Tensor&)> set;
};

/// How to make a Model of a T. `step/module.hpp` defines it for every `torch::nn` module.
template <typename T>
struct ModelOf;

/// What the step needs to know of a model: how to run it and what it owns.
/// Made from any `torch::nn` module by `step/module.hpp`, from `torch.nn.Module` by the bindings.
struct Model {
  Model() = default;
  /// From anything that has a ModelOf: module holders, shared pointers to modules, AnyModule.
  template <typename T>
    requires requires(const T& module) { ModelOf<T>::make(module); }
  Model(const T& module)
      : Model(ModelOf<T>::make(module)) {}  // NOLINT: reads as VirtualBatch(net, …)

  /// Runs the model on one micro-batch, in the caller's grad mode.
  std::function<Batch(const Batch& inputs)> forward;
  /// Asked once per step, so that parameters may be rebuilt between steps.
  std::function<std::vector<NamedParameter>()> parameters;
  std::function<std::vector<BufferSlot>()> buffers;
  /// True in training mode: plans are kept apart for train and eval.
  std::function<bool()> is_training;
  /// Another number where forward may run another program on tensors of the same shapes: where
  /// modules are others, or in another mode or, from Python, have other settings or hooks. May be
  /// empty: then nothing is known to change.
  std::function<uint64_t()> configuration;
};

}  // namespace infinitybatch
