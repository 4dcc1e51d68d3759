#pragma once

#include <ATen/core/TensorBody.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <vector>

namespace infinitybatch {

/// Graph nodes that a forward made, by their numbers, which a thread counts.
struct NodeRange {
  uint64_t thread = 0;
  uint64_t begin = 0;
  uint64_t end = 0;

  /// Of this thread, from here on.
  static NodeRange from_here();
  void end_here();
  bool empty() const noexcept { return begin == end; }
  bool contains(const torch::autograd::Node& node) const noexcept {
    const uint64_t number = node.sequence_nr();
    return node.thread_id() == thread && begin <= number && number < end;
  }
};

/// Gradients that still come through the graphs of these, which nobody keeps for backward, are
/// wrong: an error of their own.
void end_graphs(const std::vector<at::Tensor>& roots);

/// The same values, whose backward is such an error.
at::Tensor without_way_back(const at::Tensor& values);
bool has_no_way_back(const torch::autograd::Node& node);

/// Backward goes through what forward of a wrapped model left beside its outputs.
/// \throws Unsupported where that holds the samples of a micro-batch
/// \throws StateError  where it is whole, and its graph is kept for the outputs
[[noreturn]] void refuse_left(bool whole_batch);
/// The same where the engine calls.
[[noreturn]] void refuse_left_in_engine(bool whole_batch);
/// It leads to an input that requires grad. \throws Unsupported through the engine
[[noreturn]] void refuse_left_of_input_in_engine();

}  // namespace infinitybatch
