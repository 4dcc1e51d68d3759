#include "loss/head_tiles.hpp"

#include "loss/arguments.hpp"

#include <ATen/Functions.h>

#include <algorithm>

namespace infinitybatch::losses {

/// What the targets of a job are worth, row by row: with p the softmax of the scores z,
///     loss = total · log(sum exp z) - own · z_target - spread · sum_c w_c z_c,
///     d loss / d z_c = total · p_c - own · [c = target] - spread · w_c.
/// For probabilities q: total = sum_c w_c q_c, and w_c q_c stands for what is taken off.
struct HeadTiles::Targets {
  Targets(const HeadJob& job, const at::Tensor& like);

  bool are_probabilities = false;
  double smoothing = 0;                // what every class gets
  at::Tensor kept, smoothing_of_each;  // 0-dimensional, of probabilities that are smoothed
  at::Tensor of_classes;               // (1, C): w; undefined where it is needed nowhere
  at::Tensor index;                    // (R, 1), in range where ignored
  at::Tensor own, total;               // (R, 1)
  at::Tensor spread;                   // (R, 1); undefined without smoothing
  at::Tensor own_of_total;             // own / total, 0 where the row counts for nothing
  at::Tensor spread_of_total;
  at::Tensor losses;  // (R, 1)
};

HeadTiles::Targets::Targets(const HeadJob& job, const at::Tensor& like)
    : are_probabilities(job.target.dim() == 2),
      smoothing(job.label_smoothing / static_cast<double>(job.weight.size(0))),
      losses(at::empty({job.hidden.size(0), 1}, like.options())) {
  if (job.class_weight.defined()) of_classes = job.class_weight.unsqueeze(0);
  if (are_probabilities) {
    total = at::empty_like(losses);
    if (smoothing > 0) {
      kept = at::full({}, 1 - job.label_smoothing, like.options());
      smoothing_of_each = at::full({}, smoothing, like.options());
    }
    return;
  }
  const at::Tensor ignored = job.target.eq(job.ignore_index).unsqueeze(1);
  index = job.target.unsqueeze(1).masked_fill(ignored, 0);
  if (of_classes.defined()) {
    own = job.class_weight.index_select(0, index.squeeze(1)).unsqueeze(1);
  } else {
    own = at::ones_like(losses);
  }
  own.mul_(1 - job.label_smoothing).masked_fill_(ignored, 0);
  total = own;
  if (smoothing > 0) {
    if (!of_classes.defined()) of_classes = at::ones({1, job.weight.size(0)}, like.options());
    spread = at::full_like(losses, smoothing).masked_fill_(ignored, 0);
    total = own.add(spread.mul(of_classes.sum()));
  }
  const at::Tensor nothing = total.eq(0);
  own_of_total = own.div(total).masked_fill_(nothing, 0);
  if (spread.defined()) spread_of_total = spread.div(total).masked_fill_(nothing, 0);
}

HeadTiles::HeadTiles(const HeadJob& job, int64_t tile, bool wants_gradients) : tile_(tile) {
  const int64_t classes = job.weight.size(0);
  const int64_t features = job.weight.size(1);
  const at::TensorOptions narrow = job.hidden.options();
  const at::Tensor like = widened(at::empty({0}, narrow));
  const at::TensorOptions exact = like.options();
  scores_ = at::empty({tile, classes}, exact);
  if (job.softcap > 0) {
    slope_ = at::empty({tile, classes}, exact);
    softcap_ = at::full({}, job.softcap, exact);
    one_ = at::ones({}, exact);
  }
  if (job.target.dim() == 2) probabilities_ = at::empty({tile, classes}, exact);
  if (wants_gradients) product_ = at::empty({tile, features}, exact);
  for (at::Tensor* column : {&largest_, &sum_, &picked_, &share_, &factor_}) {
    *column = at::empty({tile, 1}, exact);
  }
  if (narrow.dtype() == exact.dtype()) return;
  narrow_scores_ = at::empty({tile, classes}, narrow);
  if (!wants_gradients) return;
  narrow_product_ = at::empty({tile, features}, narrow);
  narrow_weight_ = at::empty({classes, features}, narrow);
}

void HeadTiles::make_scores(const HeadJob& job, int64_t begin, int64_t end) {
  at::Tensor scores = scores_.slice(0, 0, end - begin);
  const at::Tensor hidden = job.hidden.slice(0, begin, end);
  if (narrow_scores_.defined()) {
    at::Tensor narrow = narrow_scores_.slice(0, 0, end - begin);
    at::mm_out(narrow, hidden, job.weight.t());
    scores.copy_(narrow);
  } else {
    at::mm_out(scores, hidden, job.weight.t());
  }
  if (job.bias.defined()) scores.add_(job.bias);
  if (!slope_.defined()) return;
  scores.div_(softcap_).tanh_();
  at::Tensor slope = slope_.slice(0, 0, end - begin);
  at::mul_out(slope, scores, scores);
  slope.neg_().add_(one_);
  scores.mul_(softcap_);
}

void HeadTiles::reduce(const HeadJob& job, Targets& targets, int64_t begin, int64_t end) {
  const int64_t rows = end - begin;
  at::Tensor scores = scores_.slice(0, 0, rows);
  at::Tensor largest = largest_.slice(0, 0, rows);
  at::Tensor picked = picked_.slice(0, 0, rows);
  at::Tensor share = share_.slice(0, 0, rows);
  at::Tensor sum = sum_.slice(0, 0, rows);
  at::Tensor total = targets.total.slice(0, begin, end);
  at::Tensor loss = targets.losses.slice(0, begin, end);
  at::amax_out(largest, scores, 1, /*keepdim=*/true);
  scores.sub_(largest);
  if (targets.are_probabilities) {
    at::Tensor wanted = probabilities_.slice(0, 0, rows);
    wanted.copy_(job.target.slice(0, begin, end));
    if (targets.kept.defined()) wanted.mul_(targets.kept).add_(targets.smoothing_of_each);
    if (targets.of_classes.defined()) wanted.mul_(targets.of_classes);
    at::sum_out(total, wanted, at::IntArrayRef{1}, /*keepdim=*/true);
    at::Tensor products = share.unsqueeze(2);
    at::bmm_out(products, scores.unsqueeze(1), wanted.unsqueeze(2));
  } else {
    at::gather_out(picked, scores, 1, targets.index.slice(0, begin, end));
    if (targets.spread.defined()) at::mm_out(share, scores, targets.of_classes.t());
  }
  scores.exp_();
  at::sum_out(sum, scores, at::IntArrayRef{1}, /*keepdim=*/true);
  at::log_out(loss, sum);
  loss.mul_(total);
  if (targets.are_probabilities) {
    loss.sub_(share);
  } else {
    loss.addcmul_(targets.own.slice(0, begin, end), picked, -1);
    if (targets.spread.defined()) loss.addcmul_(targets.spread.slice(0, begin, end), share, -1);
  }
}

void HeadTiles::differentiate(Targets& targets, int64_t begin, int64_t end) {
  const int64_t rows = end - begin;
  at::Tensor scores = scores_.slice(0, 0, rows);
  at::Tensor share = share_.slice(0, 0, rows);
  at::Tensor factor = factor_.slice(0, 0, rows);
  const at::Tensor sum = sum_.slice(0, 0, rows);
  at::div_out(factor, targets.total.slice(0, begin, end), sum);
  if (targets.are_probabilities) {
    scores.mul_(factor).sub_(probabilities_.slice(0, 0, rows));
    factor.fill_(1);
  } else {
    // The factor waits for the products, which have fewer numbers than the scores.
    at::mul_out(share, targets.own_of_total.slice(0, begin, end), sum);
    scores.scatter_add_(1, targets.index.slice(0, begin, end), share.neg_());
    if (targets.spread.defined()) {
      at::mul_out(share, targets.spread_of_total.slice(0, begin, end), sum);
      scores.addmm_(share, targets.of_classes, /*beta=*/1, /*alpha=*/-1);
    }
  }
  if (slope_.defined()) scores.mul_(slope_.slice(0, 0, rows));
}

void HeadTiles::add_gradients(const HeadJob& job, int64_t begin, int64_t end,
                              HeadGradients& gradients) {
  const int64_t rows = end - begin;
  const at::Tensor factor = factor_.slice(0, 0, rows);
  at::Tensor product = product_.slice(0, 0, rows);
  at::Tensor scores = scores_.slice(0, 0, rows);
  if (gradients.bias.defined()) gradients.bias.addmv_(scores.t(), factor.squeeze(1));
  const bool narrow = narrow_scores_.defined();
  if (narrow) {
    at::Tensor rounded = narrow_scores_.slice(0, 0, rows);
    rounded.copy_(scores);
    scores = rounded;
  }
  if (gradients.hidden.defined()) {
    at::Tensor out = narrow ? narrow_product_.slice(0, 0, rows) : product;
    at::mm_out(out, scores, job.weight);
    if (narrow) product.copy_(out);
    gradients.hidden.slice(0, begin, end).add_(product.mul_(factor));
  }
  if (gradients.weight.defined()) {
    product.copy_(job.hidden.slice(0, begin, end));
    product.mul_(factor);
    if (narrow) {
      // Tiles are added up in float32: rounding each sum to the products' type would not do.
      at::Tensor rounded = narrow_product_.slice(0, 0, rows);
      rounded.copy_(product);
      at::mm_out(narrow_weight_, scores.t(), rounded);
      gradients.weight.add_(narrow_weight_);
    } else {
      gradients.weight.addmm_(scores.t(), product);
    }
  }
}

at::Tensor HeadTiles::add(const HeadJob& job, HeadGradients& gradients) {
  Targets targets(job, scores_);
  for (int64_t begin = 0; begin < job.hidden.size(0); begin += tile_) {
    const int64_t end = std::min(begin + tile_, job.hidden.size(0));
    make_scores(job, begin, end);
    reduce(job, targets, begin, end);
    if (!gradients.any()) continue;
    differentiate(targets, begin, end);
    add_gradients(job, begin, end, gradients);
  }
  return targets.losses.sum(accumulation_type(targets.losses.device()));
}

}  // namespace infinitybatch::losses
