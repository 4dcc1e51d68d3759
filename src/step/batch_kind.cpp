#include "step/batch_kind.hpp"

#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>

#include <vector>

namespace infinitybatch {

Dims lengths_of(const BatchSource& inputs, const BatchSource& targets) {
  Dims dims = inputs.dims;
  dims.insert(dims.end(), targets.dims.begin(), targets.dims.end());
  return dims;
}

BatchKind batch_kind(const Problem& problem, const BatchSource& inputs,
                     const BatchSource& targets) {
  BatchKind kind;
  kind.layout = inputs.signature + "|" + targets.signature;
  kind.layout += problem.training ? "|train" : "|eval";
  kind.layout += "|" + std::to_string(at::get_num_threads());
  if (at::autocast::is_autocast_enabled(problem.device.type())) {
    kind.layout += "|autocast";
    kind.layout += c10::toString(at::autocast::get_autocast_dtype(problem.device.type()));
  }
  kind.program = kind.layout + "|program " + std::to_string(problem.program) + "|ones";
  for (const std::vector<int64_t>& leaf : lengths_of(inputs, targets)) {
    kind.lengths += '|';
    for (const int64_t size : leaf) {
      kind.program += size == 1 ? '1' : '.';
      kind.lengths += 'x' + std::to_string(size);
    }
    kind.program += ',';
  }
  return kind;
}

}  // namespace infinitybatch
