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
#include <limits>

namespace infinitybatch::losses {
namespace {

constexpr const char* kInfoNce = "info_nce";

/// log(sum_i exp(s_ij)) of each column, as the largest score and the logarithm of the rest.
struct LogSumExp {
  at::Tensor largest, rest;  // (1, M)

  at::Tensor value() const { return largest.add(rest); }
};

/// Tile by tile with a running largest score: what has been added up is scaled down whenever a
/// larger one comes.
LogSumExp of_columns(PairTiles& tiles) {
  LogSumExp found;
  found.largest =
      at::full({1, tiles.columns()}, -std::numeric_limits<double>::infinity(), tiles.options());
  at::Tensor sum = at::zeros_like(found.largest);
  for (int64_t begin = 0; begin < tiles.rows(); begin += tiles.tile()) {
    at::Tensor scores = tiles.scores(begin, std::min(begin + tiles.tile(), tiles.rows()));
    const at::Tensor largest = at::maximum(found.largest, scores.amax(0, /*keepdim=*/true));
    sum.mul_(found.largest.sub_(largest).exp_());
    found.largest = largest;
    sum.add_(scores.sub_(largest).exp_().sum(0, /*keepdim=*/true));
  }
  found.rest = sum.log_();
  return found;
}

/// The sum of all rows' losses, or of half of those and half of all columns', in float64 where the
/// device has it. Adds up gradients in `tiles` where they are wanted, without the half.
at::Tensor sum_of_losses(PairTiles& tiles, bool symmetric, bool wants_gradients) {
  at::Tensor total =
      at::zeros({}, tiles.options().dtype(accumulation_type(tiles.options().device())));
  LogSumExp of_column;
  at::Tensor column_value, column_buffer;
  if (symmetric) {
    of_column = of_columns(tiles);
    column_value = of_column.value();
    if (wants_gradients)
      column_buffer = at::empty({tiles.tile(), tiles.columns()}, tiles.options());
  }
  for (int64_t begin = 0; begin < tiles.rows(); begin += tiles.tile()) {
    const int64_t end = std::min(begin + tiles.tile(), tiles.rows());
    at::Tensor scores = tiles.scores(begin, end);
    const at::Tensor pairs = scores.diagonal(begin);
    at::Tensor by_column;
    if (symmetric) {
      const at::Tensor largest = of_column.largest.slice(1, begin, end).squeeze(0);
      const at::Tensor rest = of_column.rest.slice(1, begin, end).squeeze(0);
      total.add_(rest.sub(pairs.sub(largest)).sum(total.scalar_type()));
      if (wants_gradients) {
        by_column = column_buffer.slice(0, 0, end - begin);
        at::sub_out(by_column, scores, column_value).exp_();
      }
    }
    scores.sub_(scores.amax(1, /*keepdim=*/true));
    const at::Tensor positive = pairs.clone();
    const at::Tensor sum = scores.exp_().sum(1, /*keepdim=*/true);
    total.add_(sum.squeeze(1).log().sub_(positive).sum(total.scalar_type()));
    if (!wants_gradients) continue;
    scores.div_(sum);
    if (symmetric) scores.add_(by_column);
    at::Tensor(pairs).sub_(symmetric ? 2 : 1);
    tiles.backward(scores);
  }
  return symmetric ? total.div_(2) : total;
}

void check(const InfoNCELossOptions& options) {
  check_reduction(kInfoNce, options.reduction);
  check_tile(kInfoNce, options.tile);
  if (std::holds_alternative<double>(options.temperature)) {
    check_positive(kInfoNce, "temperature", options.temperature, {});
  }
}

}  // namespace

at::Tensor info_nce(const at::Tensor& a, const at::Tensor& b, const InfoNCELossOptions& options) {
  check(options);
  check_pair(kInfoNce, a, b);
  if (b.size(0) < a.size(0) || (options.symmetric && b.size(0) != a.size(0))) {
    throw InvalidArgument(std::string(kInfoNce) + ": " + std::to_string(a.size(0)) +
                          " embeddings need as many partners, but there are " +
                          std::to_string(b.size(0)) +
                          (options.symmetric ? "; more than that are negatives of one direction: "
                                               "symmetric=false"
                                             : ""));
  }
  const at::Tensor temperature = tensor_of(kInfoNce, "temperature", options.temperature);
  check_positive(kInfoNce, "temperature", options.temperature, temperature);
  const PairWants wants{wants_gradient(a), wants_gradient(b), wants_gradient(temperature)};
  at::Tensor value;
  PairGradients gradients;
  {
    const at::NoGradGuard no_grad;
    const NoAutocast no_autocast;
    const at::Tensor like = widened(at::empty({0}, b.options()));
    PairTiles tiles(
        a, b, value_of(options.temperature, temperature, like), options.normalize,
        rows_of_tile(kInfoNce, options.tile, a.size(0), b.size(0), b.size(1), like.element_size()),
        wants);
    value = sum_of_losses(tiles, options.symmetric, wants.any()).to(like.scalar_type());
    gradients = tiles.take(options.symmetric ? 0.5 : 1);
    if (gradients.temperature.defined()) {
      gradients.temperature = gradients.temperature.reshape(temperature.sizes());
    }
  }
  const at::Tensor sum = with_gradients(kInfoNce, value, {a, b, temperature},
                                        {gradients.rows, gradients.columns, gradients.temperature});
  return reduced(sum, options.reduction, a.size(0));
}

CoupledLoss info_nce(InfoNCELossOptions options, std::optional<at::Device> device) {
  check(options);
  return {kInfoNce,
          [options = std::move(options)](const Batch& outputs, const Batch& targets) {
            check_no_targets(kInfoNce, targets);
            const std::vector<at::Tensor> given = outputs.tensors();
            // As CLIP returns its features: with what their products are multiplied by.
            if (given.size() == 3 && given[2].numel() == 1 && given[2].is_floating_point()) {
              InfoNCELossOptions scaled = options;
              scaled.temperature = given[2].reciprocal();
              return info_nce(given[0], given[1], scaled);
            }
            const auto [a, b] = pair_of(kInfoNce, outputs);
            return info_nce(a, b, options);
          },
          device};
}

}  // namespace infinitybatch::losses
