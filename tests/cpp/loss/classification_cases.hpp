#pragma once

#include "loss/criterion_case.hpp"

namespace infinitybatch::testing {

/// What makes an index-target criterion hard.
struct IndexCase {
  const char* name;
  std::vector<int64_t> extra = {};  // dimensions behind the classes
  bool weighted = false;
  int64_t ignore_index = -100;
  double label_smoothing = 0;
  enum class Ignored { some, none, first_half, all } ignored = Ignored::some;
};

inline constexpr int64_t kClasses = 5;

/// Class indices, some of them ignored.
inline Batch index_targets(Draw& draw, const IndexCase& hard) {
  at::Tensor target = draw.integers(0, kClasses, hard.extra);
  const at::Tensor ignored = draw.integers(0, 4, hard.extra).eq(0);
  using Ignored = IndexCase::Ignored;
  if (hard.ignored == Ignored::some) target.masked_fill_(ignored, hard.ignore_index);
  if (hard.ignored == Ignored::none) target.masked_fill_(target.eq(hard.ignore_index), 0);
  if (hard.ignored == Ignored::first_half) {
    target.masked_fill_(target.eq(hard.ignore_index), 0);
    target.slice(0, 0, (draw.samples() + 1) / 2).fill_(hard.ignore_index);
    target.slice(0, draw.samples() - 1).fill_(3);  // one sample at least is left
  }
  if (hard.ignored == Ignored::all) target.fill_(hard.ignore_index);
  // A draw of few samples may ignore them all, which is another row's business.
  if (hard.ignored == Ignored::some) target.reshape({-1}).slice(0, 0, 1).fill_(3);
  return target;
}

inline const std::vector<IndexCase>& index_cases() {
  using Ignored = IndexCase::Ignored;
  static const std::vector<IndexCase> cases = {
      {"indices", {}, false, -100, 0, Ignored::none},
      {"weighted", {}, true, -100, 0, Ignored::none},
      {"ignored"},
      {"weighted_ignored_class", {}, true, 2},
      {"smoothed", {}, false, -100, 0.1, Ignored::none},
      {"smoothed_weighted_ignored", {}, true, 2, 0.3},
      {"micro_batches_all_ignored", {}, true, -100, 0, Ignored::first_half},
      {"1d_weighted_ignored_smoothed", {6}, true, -100, 0.2},
      {"2d_weighted_ignored", {3, 2}, true, -100},
      {"2d_smoothed_ignored", {3, 2}, false, 2, 0.2},
      {"3d_weighted_ignored_smoothed", {2, 2, 2}, true, 2, 0.2},
      {"all_ignored", {}, false, -100, 0, Ignored::all},
      {"all_ignored_weighted_2d", {3, 2}, true, 2, 0, Ignored::all},
      {"all_ignored_smoothed", {}, true, -100, 0.1, Ignored::all},
  };
  return cases;
}

inline std::vector<int64_t> with_classes(std::vector<int64_t> extra) {
  extra.insert(extra.begin(), kClasses);
  return extra;
}

inline void add_index_case(std::vector<CriterionCase>& cases, const IndexCase& hard, Reduction r) {
  const std::vector<int64_t> shape = with_classes(hard.extra);
  const int64_t features = c10::multiply_integers(shape);
  const bool finite = hard.ignored != IndexCase::Ignored::all || r == Reduction::sum;
  const auto weight = [weighted = hard.weighted](const at::TensorOptions& options) {
    return weighted ? weights({kClasses}, options) : at::Tensor();
  };
  const auto targets = [hard](Draw& draw) { return index_targets(draw, hard); };
  const auto torch_options = [hard, weight, r](const at::Tensor& output) {
    return with_reduction(F::CrossEntropyFuncOptions()
                              .weight(weight(output.options()))
                              .ignore_index(hard.ignore_index)
                              .label_smoothing(hard.label_smoothing),
                          r);
  };
  const auto our_options = [hard, weight, r](const at::TensorOptions& options) {
    return losses::CrossEntropyLossOptions{weight(options), hard.ignore_index, hard.label_smoothing,
                                           r};
  };
  cases.push_back({std::string("cross_entropy/") + hard.name + suffix(r), features, reshaped(shape),
                   targets,
                   [torch_options](const Tensors& o, const Tensors& t) {
                     return F::cross_entropy(o[0], t[0], torch_options(o[0]));
                   },
                   [our_options](const at::TensorOptions& options) {
                     return losses::cross_entropy(our_options(options));
                   },
                   finite});
  if (hard.label_smoothing == 0) {
    cases.push_back({std::string("nll_loss/") + hard.name + suffix(r), features,
                     log_probabilities(shape), targets,
                     [hard, weight, r](const Tensors& o, const Tensors& t) {
                       return F::nll_loss(o[0], t[0],
                                          with_reduction(F::NLLLossFuncOptions()
                                                             .weight(weight(o[0].options()))
                                                             .ignore_index(hard.ignore_index),
                                                         r));
                     },
                     [hard, weight, r](const at::TensorOptions& options) {
                       return losses::nll({weight(options), hard.ignore_index, r});
                     },
                     finite});
  }
  if (hard.extra.size() < 2) {  // features 4 -> logits (C, extra...)
    const auto linear = [shape, features](const at::TensorOptions& options) {
      std::vector<int64_t> bias = shape, weight = shape;
      weight.push_back(4);
      return std::pair(weights(weight, options).cos(), weights(bias, options).sin());
    };
    cases.push_back(
        {std::string("linear_cross_entropy/") + hard.name + suffix(r), 4, reshaped({4}), targets,
         [linear, shape, torch_options](const Tensors& o, const Tensors& t) {
           const auto [weight, bias] = linear(o[0].options());
           std::vector<int64_t> logits = shape;
           logits.insert(logits.begin(), o[0].size(0));
           return F::cross_entropy(
               at::linear(o[0], weight.reshape({-1, 4}), bias.reshape({-1})).reshape(logits), t[0],
               torch_options(o[0]));
         },
         [linear, our_options](const at::TensorOptions& options) {
           const auto [weight, bias] = linear(options);
           return losses::linear_cross_entropy(weight, bias, our_options(options));
         },
         finite});
  }
}

inline void add_probability_case(std::vector<CriterionCase>& cases, const char* name,
                                 const std::vector<int64_t>& extra, bool weighted, double smoothing,
                                 Reduction r) {
  const std::vector<int64_t> shape = with_classes(extra);
  const auto weight = [weighted](const at::TensorOptions& options) {
    return weighted ? weights({kClasses}, options) : at::Tensor();
  };
  cases.push_back({std::string("cross_entropy/") + name + suffix(r), c10::multiply_integers(shape),
                   reshaped(shape),
                   [shape](Draw& draw) { return Batch(draw.probabilities(shape)); },
                   [weight, smoothing, r](const Tensors& o, const Tensors& t) {
                     return F::cross_entropy(o[0], t[0],
                                             with_reduction(F::CrossEntropyFuncOptions()
                                                                .weight(weight(o[0].options()))
                                                                .label_smoothing(smoothing),
                                                            r));
                   },
                   [weight, smoothing, r](const at::TensorOptions& options) {
                     return losses::cross_entropy({weight(options), -100, smoothing, r});
                   }});
}

inline void add_multi_margin_case(std::vector<CriterionCase>& cases, const char* name, int64_t p,
                                  double margin, bool weighted, Reduction r) {
  const auto weight = [weighted](const at::TensorOptions& options) {
    return weighted ? weights({kClasses}, options) : at::Tensor();
  };
  cases.push_back(
      {std::string("multi_margin_loss/") + name + suffix(r), kClasses, reshaped({kClasses}),
       [](Draw& draw) { return Batch(draw.integers(0, kClasses, {})); },
       [=](const Tensors& o, const Tensors& t) {
         return F::multi_margin_loss(
             o[0], t[0],
             with_reduction(
                 F::MultiMarginLossFuncOptions().p(p).margin(margin).weight(weight(o[0].options())),
                 r));
       },
       [=](const at::TensorOptions& options) {
         return losses::multi_margin({p, margin, weight(options), r});
       }});
}

inline void add_classification_cases(std::vector<CriterionCase>& cases) {
  for (Reduction r : kMeanAndSum) {
    for (const IndexCase& hard : index_cases()) add_index_case(cases, hard, r);
    add_probability_case(cases, "probabilities", {}, false, 0, r);
    add_probability_case(cases, "probabilities_weighted", {}, true, 0, r);
    add_probability_case(cases, "probabilities_2d_weighted_smoothed", {3, 2}, true, 0.2, r);
    add_multi_margin_case(cases, "p1", 1, 1.0, false, r);
    add_multi_margin_case(cases, "p2_weighted_margin", 2, 0.7, true, r);
  }
}

}  // namespace infinitybatch::testing
