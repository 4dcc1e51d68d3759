#pragma once

#include "core/rng.hpp"
#include "core/torch_compat.hpp"
#include "coupled/coupling_watch.hpp"
#include "coupled/original_weights.hpp"
#include "execute/carried_state.hpp"
#include "execute/problem.hpp"

#include <optional>
#include <string>
#include <vector>

namespace infinitybatch {

/// A model while `verify` looks at it: each look starts from the same buffers, random state and
/// empty `.grad`, in fp64 on demand, and in the end everything is as it was.
class ExaminedModel {
 public:
  /// \param problem admitted already
  explicit ExaminedModel(const Problem& problem);
  ~ExaminedModel();
  ExaminedModel(const ExaminedModel&) = delete;
  ExaminedModel& operator=(const ExaminedModel&) = delete;

  /// Parameters and buffers in fp64 from now on.
  void turn_to_double();
  /// The model's own forward. What it does to parameters (`max_norm`) is undone by `reset`.
  Batch forward(const Batch& inputs);
  /// Buffers, rewritten weights and random state as in the beginning, no `.grad`.
  void reset();
  /// What stands in `.grad`, one for each parameter; undefined where there is none.
  std::vector<at::Tensor> take_gradients();
  /// What buffers hold, in fp64, one for each of `buffer_names`.
  std::vector<at::Tensor> read_buffers() const;
  /// Those that there are, in the model's order.
  std::vector<std::string> buffer_names() const;

 private:
  struct Kept {
    const BufferSlot* slot = nullptr;  // of a buffer
    at::Tensor tensor;
    at::Tensor data;    // the same memory under another tensor
    at::Tensor values;  // of a buffer: a copy
    at::Tensor grad;
    compat::NodePtr accumulator;
  };

  /// Forward may have put another tensor in its place.
  static void put_back(const Kept& buffer);

  void begin_watch();

  const Problem& problem_;
  coupled::OriginalWeights weights_;
  std::optional<coupled::CouplingWatch> watch_;
  coupled::WatchedMemory memory_;
  CarriedState state_{memory_};
  RngSnapshot random_;
  std::vector<Kept> parameters_;
  std::vector<Kept> buffers_;
  bool in_double_ = false;
};

/// Floating tensors in fp64, complex ones in complex fp64.
at::Tensor to_double(const at::Tensor& tensor);
Batch to_double(const Batch& batch);

}  // namespace infinitybatch
