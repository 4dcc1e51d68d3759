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

constexpr const char* kSupCon = "sup_con";
constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// (n, 1): the sum of products in each row, without a matrix of them.
at::Tensor row_products(const at::Tensor& a, const at::Tensor& b) {
  return at::bmm(a.unsqueeze(1), b.unsqueeze(2)).squeeze(2);
}

/// \param labels (N) int64 where the scores are
at::Tensor sum_of_losses(PairTiles& tiles, const at::Tensor& labels, bool wants_gradients) {
  at::Tensor total =
      at::zeros({}, tiles.options().dtype(accumulation_type(tiles.options().device())));
  at::Tensor buffer = at::empty({tiles.tile(), tiles.columns()}, tiles.options());
  at::Tensor same_buffer =
      at::empty({tiles.tile(), tiles.columns()}, buffer.options().dtype(at::kBool));
  for (int64_t begin = 0; begin < tiles.rows(); begin += tiles.tile()) {
    const int64_t end = std::min(begin + tiles.tile(), tiles.rows());
    at::Tensor same = same_buffer.slice(0, 0, end - begin);
    at::eq_out(same, labels.slice(0, begin, end).unsqueeze(1), labels);
    same.diagonal(begin).fill_(false);
    at::Tensor positives = buffer.slice(0, 0, end - begin);
    positives.copy_(same);
    const at::Tensor count = positives.sum(1, /*keepdim=*/true);
    const at::Tensor alone = count.eq(0);
    positives.div_(count.masked_fill(alone, 1));

    // An embedding is not its own negative. Alone in the batch it has no score at all.
    at::Tensor scores = tiles.scores(begin, end);
    scores.diagonal(begin).fill_(-kInfinity);
    at::Tensor largest = scores.amax(1, /*keepdim=*/true);
    scores.sub_(largest.masked_fill_(largest.eq(-kInfinity), 0));
    scores.diagonal(begin).fill_(0);  // 0 · infinity is not 0
    const at::Tensor attracted = row_products(scores, positives);
    scores.diagonal(begin).fill_(-kInfinity);
    const at::Tensor sum = scores.exp_().sum(1, /*keepdim=*/true).masked_fill_(alone, 1);
    total.add_(sum.log().sub_(attracted).masked_fill_(alone, 0).sum(total.scalar_type()));
    if (!wants_gradients) continue;
    scores.div_(sum).masked_fill_(alone, 0).sub_(positives);
    tiles.backward(scores);
  }
  return total;
}

void check(const SupConLossOptions& options) {
  check_reduction(kSupCon, options.reduction);
  check_tile(kSupCon, options.tile);
  if (std::holds_alternative<double>(options.temperature)) {
    check_positive(kSupCon, "temperature", options.temperature, {});
  }
}

/// (N · V) int64: the label of each view of each sample.
at::Tensor labels_of_views(const at::Tensor& labels, const at::Tensor& embeddings) {
  const int64_t samples = embeddings.size(0);
  const int64_t views = embeddings.dim() == 3 ? embeddings.size(1) : 1;
  at::Tensor of_samples = labels;
  if (!labels.defined()) {
    of_samples = at::arange(samples, embeddings.options().dtype(at::kLong));
  } else if (labels.dim() != 1 || labels.size(0) != samples ||
             !at::isIntegralType(labels.scalar_type(), /*includeBool=*/true)) {
    throw InvalidArgument(std::string(kSupCon) + " takes one integer label for each of the " +
                          std::to_string(samples) + " samples, but was given " + shape_of(labels) +
                          " of " + c10::toString(labels.scalar_type()));
  }
  return of_samples.to(embeddings.device(), at::kLong).repeat_interleave(views);
}

}  // namespace

at::Tensor sup_con(const at::Tensor& embeddings, const at::Tensor& labels,
                   const SupConLossOptions& options) {
  check(options);
  if (!embeddings.defined() || !embeddings.is_floating_point() || embeddings.dim() < 2 ||
      embeddings.dim() > 3) {
    throw InvalidArgument(std::string(kSupCon) +
                          " takes floating point embeddings (N, D) or (N, views, D), but was "
                          "given " +
                          (embeddings.defined() ? shape_of(embeddings) : "nothing"));
  }
  const at::Tensor temperature = tensor_of(kSupCon, "temperature", options.temperature);
  check_positive(kSupCon, "temperature", options.temperature, temperature);
  const at::Tensor of_views = labels_of_views(labels, embeddings);
  const bool wants_rows = wants_gradient(embeddings);
  const PairWants wants{wants_rows, wants_rows, wants_gradient(temperature)};
  const int64_t rows = of_views.size(0);
  at::Tensor value;
  PairGradients gradients;
  {
    const at::NoGradGuard no_grad;
    const NoAutocast no_autocast;
    const at::Tensor flat = embeddings.reshape({rows, embeddings.size(-1)});
    const at::Tensor like = widened(at::empty({0}, flat.options()));
    PairTiles tiles(
        flat, {}, value_of(options.temperature, temperature, like), options.normalize,
        rows_of_tile(kSupCon, options.tile, rows, rows, flat.size(1), like.element_size()), wants);
    value = sum_of_losses(tiles, of_views, wants.any()).to(like.scalar_type());
    gradients = tiles.take(1);
    if (gradients.rows.defined()) gradients.rows = gradients.rows.reshape(embeddings.sizes());
    if (gradients.temperature.defined()) {
      gradients.temperature = gradients.temperature.reshape(temperature.sizes());
    }
  }
  const at::Tensor sum = with_gradients(kSupCon, value, {embeddings, temperature},
                                        {gradients.rows, gradients.temperature});
  return reduced(sum, options.reduction, rows);
}

CoupledLoss sup_con(SupConLossOptions options, std::optional<at::Device> device) {
  check(options);
  return {kSupCon,
          [options = std::move(options)](const Batch& outputs, const Batch& targets) {
            const std::vector<at::Tensor> embeddings = outputs.tensors();
            const std::vector<at::Tensor> labels = targets.tensors();
            if (embeddings.size() != 1 || labels.size() > 1) {
              throw InvalidArgument(std::string(kSupCon) +
                                    " takes one tensor of embeddings and at most one of labels, "
                                    "but was given " +
                                    std::to_string(embeddings.size()) + " and " +
                                    std::to_string(labels.size()));
            }
            return sup_con(embeddings[0], labels.empty() ? at::Tensor() : labels[0], options);
          },
          device};
}

}  // namespace infinitybatch::losses
