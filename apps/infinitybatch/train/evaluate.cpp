#include "train/evaluate.hpp"

#include <ATen/Functions.h>
#include <ATen/core/Reduction.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "interrupt.hpp"

namespace infinitybatch::app {
namespace {

/// Sums, so that slices add up to the split whatever their sizes.
struct Sums {
  double loss = 0;
  double right = 0;
  double count = 0;
};

Sums measure(Network& network, const Split& split, c10::Device device, int64_t begin, int64_t end) {
  const at::Tensor indices = at::arange(begin, end, at::kLong);
  const at::Tensor targets = split.targets(indices).to(device);
  const at::Tensor scores = network.forward(split.inputs(indices).to(device));
  const at::Tensor loss =
      at::cross_entropy_loss(scores, targets, /*weight=*/{}, at::Reduction::Sum);
  const at::Tensor right = scores.argmax(1).eq(targets).sum();
  return {loss.item<double>(), right.item<double>(), static_cast<double>(targets.numel())};
}

}  // namespace

Scores evaluate(Network& network, const Split& split, c10::Device device, int64_t& slice) {
  at::NoGradGuard no_grad;
  network.eval();
  Sums total;
  for (int64_t begin = 0; begin < split.size;) {
    check_interrupt();
    const int64_t end = std::min(begin + slice, split.size);
    try {
      const Sums part = measure(network, split, device, begin, end);
      total.loss += part.loss;
      total.right += part.right;
      total.count += part.count;
      begin = end;
    } catch (const c10::OutOfMemoryError&) {
      if (end - begin == 1) {
        network.train();
        throw;
      }
      slice = (end - begin) / 2;
    }
  }
  network.train();
  return {total.loss / total.count, total.right / total.count};
}

}  // namespace infinitybatch::app
