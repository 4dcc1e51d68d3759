#include "loss/arguments.hpp"
#include "loss/embeddings.hpp"
#include "loss/known_gradients.hpp"
#include "loss/pair_tiles.hpp"
#include "loss/tiles.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/loss/contrastive.hpp>

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>

#include <algorithm>

namespace infinitybatch::losses {
namespace {

constexpr const char* kSiglip = "siglip";
// From here on log(1 + exp(x)) is x in float64 too: exp(-40) is below its precision.
constexpr double kLinearFrom = 40;

struct Sums {
  at::Tensor loss, bias_gradient;
};

/// log(1 + exp(-y z)) added up, where y z is the score, negated off the diagonal: no difference of
/// large numbers is taken anywhere.
Sums sums_of(PairTiles& tiles, const at::Tensor& bias, bool wants_gradients) {
  const at::TensorOptions exact =
      tiles.options().dtype(accumulation_type(tiles.options().device()));
  Sums sums{at::zeros({}, exact), at::zeros({}, exact)};
  at::Tensor buffer = at::empty({tiles.tile(), tiles.columns()}, tiles.options());
  for (int64_t begin = 0; begin < tiles.rows(); begin += tiles.tile()) {
    const int64_t end = std::min(begin + tiles.tile(), tiles.rows());
    at::Tensor scores = tiles.scores(begin, end).add_(bias);
    at::Tensor pairs = scores.diagonal(begin);
    pairs.neg_();
    at::Tensor losses = buffer.slice(0, 0, end - begin);
    at::softplus_out(losses, scores, /*beta=*/1, /*threshold=*/kLinearFrom);
    sums.loss.add_(losses.sum(1).sum(sums.loss.scalar_type()));
    if (!wants_gradients) continue;
    scores.sigmoid_();
    pairs.neg_();
    sums.bias_gradient.add_(scores.sum(1).sum(sums.loss.scalar_type()));
    tiles.backward(scores);
  }
  return sums;
}

void check(const SigLIPLossOptions& options) {
  check_reduction(kSiglip, options.reduction);
  check_tile(kSiglip, options.tile);
  if (std::holds_alternative<double>(options.temperature)) {
    check_positive(kSiglip, "temperature", options.temperature, {});
  }
}

}  // namespace

at::Tensor siglip(const at::Tensor& a, const at::Tensor& b, const SigLIPLossOptions& options) {
  check(options);
  check_pair(kSiglip, a, b);
  if (b.size(0) < a.size(0)) {
    throw InvalidArgument(std::string(kSiglip) + ": " + std::to_string(a.size(0)) +
                          " embeddings need as many partners, but there are " +
                          std::to_string(b.size(0)));
  }
  const at::Tensor temperature = tensor_of(kSiglip, "temperature", options.temperature);
  check_positive(kSiglip, "temperature", options.temperature, temperature);
  const at::Tensor bias = tensor_of(kSiglip, "bias", options.bias);
  const PairWants wants{wants_gradient(a), wants_gradient(b), wants_gradient(temperature)};
  const bool wants_bias = wants_gradient(bias);
  Sums sums;
  PairGradients gradients;
  {
    const at::NoGradGuard no_grad;
    const NoAutocast no_autocast;
    const at::Tensor like = widened(at::empty({0}, b.options()));
    PairTiles tiles(
        a, b, value_of(options.temperature, temperature, like), options.normalize,
        rows_of_tile(kSiglip, options.tile, a.size(0), b.size(0), b.size(1), like.element_size()),
        wants);
    sums = sums_of(tiles, value_of(options.bias, bias, like), wants.any() || wants_bias);
    sums.loss = sums.loss.to(like.scalar_type());
    gradients = tiles.take(1);
    if (gradients.temperature.defined()) {
      gradients.temperature = gradients.temperature.reshape(temperature.sizes());
    }
    sums.bias_gradient = wants_bias ? sums.bias_gradient.reshape(bias.sizes()) : at::Tensor();
  }
  const at::Tensor sum = with_gradients(
      kSiglip, sums.loss, {a, b, temperature, bias},
      {gradients.rows, gradients.columns, gradients.temperature, sums.bias_gradient});
  return reduced(sum, options.reduction, a.size(0));
}

CoupledLoss siglip(SigLIPLossOptions options, std::optional<at::Device> device) {
  check(options);
  return {kSiglip,
          [options = std::move(options)](const Batch& outputs, const Batch& targets) {
            check_no_targets(kSiglip, targets);
            const auto [a, b] = pair_of(kSiglip, outputs);
            return siglip(a, b, options);
          },
          device};
}

}  // namespace infinitybatch::losses
