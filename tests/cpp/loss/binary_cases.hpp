#pragma once

#include "loss/criterion_case.hpp"

namespace infinitybatch::testing {

/// Where the weights of a binary criterion come from.
enum class Weights { none, per_class, per_sample };

inline const char* suffix(Weights weights) {
  switch (weights) {
    case Weights::none:
      return "plain";
    case Weights::per_class:
      return "weighted";
    default:
      return "sample_weights";
  }
}

/// (target) or, where each sample has its own, (target, weight).
inline std::function<Batch(Draw&)> binary_targets(Weights kind, std::vector<int64_t> shape) {
  return [=](Draw& draw) -> Batch {
    const at::Tensor target = draw.uniform(shape);
    if (kind != Weights::per_sample) return target;
    return Batch::tuple({target, draw.uniform(shape, 0.2, 2)});
  };
}

/// The weight of the whole batch, as native takes it.
inline at::Tensor native_weight(Weights kind, const Tensors& o, const Tensors& t, size_t position) {
  if (kind == Weights::none) return {};
  return kind == Weights::per_class ? weights({4}, o[0].options()) : t[position];
}

inline at::Tensor our_weight(Weights kind, const at::TensorOptions& options) {
  return kind == Weights::per_class ? weights({4}, options) : at::Tensor();
}

inline void add_binary_case(std::vector<CriterionCase>& cases, Weights kind, Reduction r) {
  const std::string name = std::string(suffix(kind)) + suffix(r);
  cases.push_back(
      {"binary_cross_entropy/" + name, 12, probabilities({3, 4}), binary_targets(kind, {3, 4}),
       [=](const Tensors& o, const Tensors& t) {
         return F::binary_cross_entropy(
             o[0], t[0],
             with_reduction(F::BinaryCrossEntropyFuncOptions().weight(native_weight(kind, o, t, 1)),
                            r));
       },
       [=](const at::TensorOptions& options) {
         return losses::binary_cross_entropy({our_weight(kind, options), r});
       }});
  cases.push_back(
      {"binary_cross_entropy_with_logits/" + name, 12, reshaped({3, 4}),
       binary_targets(kind, {3, 4}),
       [=](const Tensors& o, const Tensors& t) {
         return F::binary_cross_entropy_with_logits(
             o[0], t[0],
             with_reduction(
                 F::BinaryCrossEntropyWithLogitsFuncOptions().weight(native_weight(kind, o, t, 1)),
                 r));
       },
       [=](const at::TensorOptions& options) {
         return losses::binary_cross_entropy_with_logits({our_weight(kind, options), {}, r});
       }});
  cases.push_back(
      {"multilabel_soft_margin_loss/" + name, 12, reshaped({3, 4}), binary_targets(kind, {3, 4}),
       [=](const Tensors& o, const Tensors& t) {
         return F::multilabel_soft_margin_loss(
             o[0], t[0],
             with_reduction(
                 F::MultilabelSoftMarginLossFuncOptions().weight(native_weight(kind, o, t, 1)), r));
       },
       [=](const at::TensorOptions& options) {
         return losses::multilabel_soft_margin({our_weight(kind, options), r});
       }});
}

inline void add_pos_weight_cases(std::vector<CriterionCase>& cases, Reduction r) {
  const auto native = [r](const at::Tensor& o, const at::Tensor& t, const at::Tensor& weight,
                          const at::Tensor& pos_weight) {
    return F::binary_cross_entropy_with_logits(
        o, t,
        with_reduction(
            F::BinaryCrossEntropyWithLogitsFuncOptions().weight(weight).pos_weight(pos_weight), r));
  };
  const std::string name = "binary_cross_entropy_with_logits/";
  cases.push_back(
      {name + "pos_weight" + suffix(r), 12, reshaped({3, 4}), binary_targets(Weights::none, {3, 4}),
       [native](const Tensors& o, const Tensors& t) {
         return native(o[0], t[0], {}, weights({4}, o[0].options()));
       },
       [r](const at::TensorOptions& options) {
         return losses::binary_cross_entropy_with_logits({{}, weights({4}, options), r});
       }});
  cases.push_back({name + "weight_and_pos_weight" + suffix(r), 12, reshaped({3, 4}),
                   binary_targets(Weights::none, {3, 4}),
                   [native](const Tensors& o, const Tensors& t) {
                     return native(o[0], t[0], weights({1, 3, 1}, o[0].options()),
                                   weights({3, 4}, o[0].options()));
                   },
                   [r](const at::TensorOptions& options) {
                     return losses::binary_cross_entropy_with_logits(
                         {weights({1, 3, 1}, options), weights({3, 4}, options), r});
                   }});
  cases.push_back(
      {name + "sample_pos_weight" + suffix(r), 12, reshaped({3, 4}),
       [](Draw& draw) {
         return Batch::tuple(
             {draw.uniform({3, 4}), draw.uniform({1, 1}, 0.2, 2), draw.uniform({3, 1}, 0.2, 2)});
       },
       [native](const Tensors& o, const Tensors& t) { return native(o[0], t[0], t[1], t[2]); },
       [r](const at::TensorOptions&) {
         return losses::binary_cross_entropy_with_logits({{}, {}, r});
       }});
}

inline void add_label_cases(std::vector<CriterionCase>& cases, Reduction r) {
  cases.push_back({std::string("soft_margin_loss/plain") + suffix(r), 6, reshaped({2, 3}),
                   [](Draw& draw) { return Batch(draw.signs({2, 3})); },
                   [=](const Tensors& o, const Tensors& t) {
                     return F::soft_margin_loss(o[0], t[0],
                                                with_reduction(F::SoftMarginLossFuncOptions(), r));
                   },
                   [=](const at::TensorOptions&) { return losses::soft_margin(r); }});
  cases.push_back({std::string("multilabel_margin_loss/plain") + suffix(r), 4, reshaped({4}),
                   [](Draw& draw) {  // one or two labels, then -1
                     const at::Tensor first = draw.integers(0, 2, {1});
                     const at::Tensor second = draw.integers(1, 4, {1});
                     const at::Tensor end = at::full_like(first, -1);
                     return Batch(
                         at::cat({first, at::where(second.eq(1), end, second), end, first}, 1));
                   },
                   [=](const Tensors& o, const Tensors& t) {
                     return F::multilabel_margin_loss(
                         o[0], t[0], with_reduction(F::MultilabelMarginLossFuncOptions(), r));
                   },
                   [=](const at::TensorOptions&) { return losses::multilabel_margin(r); }});
  cases.push_back(
      {std::string("multilabel_soft_margin_loss/broadcast") + suffix(r), 12, reshaped({3, 4}),
       [](Draw& draw) { return Batch(draw.uniform({1, 4})); },
       [=](const Tensors& o, const Tensors& t) {
         return F::multilabel_soft_margin_loss(
             o[0], t[0], with_reduction(F::MultilabelSoftMarginLossFuncOptions(), r));
       },
       [=](const at::TensorOptions&) { return losses::multilabel_soft_margin({{}, r}); }});
}

inline void add_binary_cases(std::vector<CriterionCase>& cases) {
  for (Reduction r : kMeanAndSum) {
    for (Weights kind : {Weights::none, Weights::per_class, Weights::per_sample}) {
      add_binary_case(cases, kind, r);
    }
    add_pos_weight_cases(cases, r);
    add_label_cases(cases, r);
  }
}

}  // namespace infinitybatch::testing
