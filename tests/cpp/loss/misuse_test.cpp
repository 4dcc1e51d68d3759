// What the ready-made losses refuse, each with a message that names shapes and a way out.
#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/loss/criteria.hpp>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

namespace infinitybatch {
namespace {

struct Misuse {
  const char* name;
  std::function<void()> call;
  std::vector<std::string> message;  // parts that it must have
};

/// Both things that the step does with a micro-batch.
void use(const SeparableLoss& loss, const Batch& outputs, const Batch& targets) {
  loss.denominator(targets, 4);
  loss.sum(outputs, targets);
}

at::Tensor zeros(at::IntArrayRef sizes) {
  return at::zeros(sizes);
}
at::Tensor labels(at::IntArrayRef sizes) {
  return at::zeros(sizes, at::kLong);
}

std::vector<Misuse> shape_misuses() {
  return {
      {"mse_column_against_row",
       [] { use(losses::mse(), zeros({4, 1}), zeros({4})); },
       {"mse_loss", "[4, 1]", "[4]", "squeeze"}},
      {"mse_row_against_column",
       [] { use(losses::mse(), zeros({4}), zeros({4, 1})); },
       {"mse_loss", "[4, 1]", "[4]"}},
      {"mse_of_one_sample", [] { use(losses::mse(), zeros({1, 1}), zeros({1})); }, {"[1, 1]"}},
      {"smooth_l1_other_number_of_samples",
       [] { use(losses::smooth_l1(), zeros({4, 3}), zeros({1, 3})); },
       {"[4, 3]", "[1, 3]"}},
      {"kl_div_other_rank",
       [] { use(losses::kl_div(), zeros({4, 3}), zeros({3})); },
       {"kl_div", "[4, 3]", "[3]"}},
      {"gaussian_target_rank",
       [] {
         use(losses::gaussian_nll(), Batch::tuple({zeros({4, 1}), zeros({4, 1})}), zeros({4}));
       },
       {"gaussian_nll_loss", "[4, 1]", "[4]"}},
      {"gaussian_variance_shape",
       [] {
         use(losses::gaussian_nll(), Batch::tuple({zeros({4, 3}), at::ones({4, 2})}),
             zeros({4, 3}));
       },
       {"variance of shape [4, 2]", "[4, 3]"}},
      {"gaussian_variance_two_singletons",
       [] {
         use(losses::gaussian_nll(), Batch::tuple({zeros({4, 3, 2}), at::ones({4, 1, 1})}),
             zeros({4, 3, 2}));
       },
       {"[4, 1, 1]"}},
      {"gaussian_negative_variance",
       [] {
         use(losses::gaussian_nll(), Batch::tuple({zeros({4, 3}), -at::ones({4, 3})}),
             zeros({4, 3}));
       },
       {"negative", "softplus"}},
      {"bce_shape",
       [] { use(losses::binary_cross_entropy(), zeros({4, 1}), zeros({4})); },
       {"binary_cross_entropy", "[4, 1]", "[4]"}},
      {"bce_logits_shape",
       [] { use(losses::binary_cross_entropy_with_logits(), zeros({4, 3}), zeros({4, 1})); },
       {"[4, 3]", "[4, 1]"}},
      {"cross_entropy_without_classes",
       [] { use(losses::cross_entropy(), zeros({4}), labels({4})); },
       {"cross_entropy", "(N, C, ...)", "[4]"}},
      {"nll_without_classes", [] { use(losses::nll(), zeros({4}), labels({4})); }, {"nll_loss"}},
      {"cross_entropy_float_indices",
       [] { use(losses::cross_entropy(), zeros({4, 3}), zeros({4})); },
       {"[4]", "class probabilities", "integers"}},
      {"multi_margin_without_classes",
       [] { use(losses::multi_margin(), zeros({4}), labels({4})); },
       {"multi_margin_loss"}},
      {"multilabel_margin_one_sample",
       [] { use(losses::multilabel_margin(), zeros({4}), labels({4})); },
       {"(N, C)", "[4]"}},
      {"multilabel_soft_margin_one_sample",
       [] { use(losses::multilabel_soft_margin(), zeros({4}), zeros({4})); },
       {"(N, ..., C)"}},
      {"cosine_number_of_targets",
       [] {
         use(losses::cosine_embedding(), Batch::tuple({zeros({4, 2}), zeros({4, 2})}), zeros({1}));
       },
       {"cosine_embedding_loss", "[1]"}},
      {"cosine_one_embedding_for_all",
       [] {
         use(losses::cosine_embedding(), Batch::tuple({zeros({4, 2}), zeros({1, 2})}), zeros({4}));
       },
       {"[4, 2], [1, 2]"}},
      {"margin_ranking_rank",
       [] {
         use(losses::margin_ranking(), Batch::tuple({zeros({4, 1}), zeros({4, 1})}), zeros({4}));
       },
       {"margin_ranking_loss", "[4, 1]", "[4]"}},
      {"triplet_without_batch",
       [] {
         use(losses::triplet_margin(), Batch::tuple({zeros({4}), zeros({4}), zeros({4})}), {});
       },
       {"triplet_margin_loss", "[4], [4], [4]"}},
      {"triplet_one_negative_for_all",
       [] {
         use(losses::triplet_margin(), Batch::tuple({zeros({4, 2}), zeros({4, 2}), zeros({1, 2})}),
             {});
       },
       {"[1, 2]"}},
      {"linear_bias_shape",
       [] { losses::linear_cross_entropy(zeros({3, 2}), zeros({2})); },
       {"[2]", "[3, 2]"}},
      {"linear_weight_rank",
       [] { losses::linear_cross_entropy(zeros({3})); },
       {"(C, ..., features)"}},
      {"linear_outputs_rank",
       [] {
         use(losses::linear_cross_entropy(zeros({3, 2})), zeros({4, 5, 2}).sum(), labels({4}));
       },
       {"outputs (N, ..., features)"}},
  };
}

Batch triplet() {
  return Batch::tuple({at::rand({4, 2}), at::rand({4, 2}), at::rand({4, 2})});
}

std::vector<Misuse> coupling_misuses() {
  using at::Tensor;
  const auto with_distance = [](std::function<Tensor(const Tensor&, const Tensor&)> distance) {
    return losses::triplet_margin_with_distance({std::move(distance)});
  };
  return {
      {"distance_between_samples",
       [=] {
         use(with_distance([](const Tensor& a, const Tensor& b) { return at::cdist(a, b); }),
             triplet(), {});
       },
       {"[4, 2]", "[4, 4]", "pair by pair"}},
      {"distance_reduced",
       [=] {
         use(with_distance([](const Tensor& a, const Tensor& b) { return (a - b).abs().mean(); }),
             triplet(), {});
       },
       {"has shape []"}},
      {"bce_weight_of_each_sample",
       [] { use(losses::binary_cross_entropy({at::ones({7, 1})}), zeros({4, 3}), zeros({4, 3})); },
       {"weight of shape [7, 1]", "[4, 3]", "(target, weight)"}},
      {"bce_weight_of_each_sample_1d",
       [] { use(losses::binary_cross_entropy({at::ones({4})}), zeros({4}), zeros({4})); },
       {"(target, weight)"}},
      {"pos_weight_of_each_sample",
       [] {
         use(losses::binary_cross_entropy_with_logits({{}, at::ones({7, 3})}), zeros({4, 3}),
             zeros({4, 3}));
       },
       {"pos_weight of shape [7, 3]", "(target, weight, pos_weight)"}},
      {"multilabel_weight_of_each_sample",
       [] {
         use(losses::multilabel_soft_margin({at::ones({7, 3})}), zeros({4, 3}), zeros({4, 3}));
       },
       {"[7, 3]", "(target, weight)"}},
      {"weight_given_twice",
       [] {
         use(losses::binary_cross_entropy({at::ones({3})}), zeros({4, 3}),
             Batch::tuple({zeros({4, 3}), at::ones({4, 3})}));
       },
       {"twice"}},
      {"sample_weights_of_other_rank",
       [] {
         use(losses::binary_cross_entropy(), zeros({4, 3}),
             Batch::tuple({zeros({4, 3}), at::ones({4})}));
       },
       {"[4, 3]", "[4]"}},
      {"mse_weight_shape",
       [] { use(losses::mse(), zeros({4, 3}), Batch::tuple({zeros({4, 3}), at::ones({4, 1})})); },
       {"weight of shape [4, 1]", "[4, 3]"}},
      {"shared_targets",
       [] { use(losses::mse(), zeros({4, 3}), Batch(zeros({4, 3})).shared()); },
       {"every micro-batch sees whole"}},
      {"batchmean_over_another_dimension",
       [] {
         use(losses::kl_div({false, Reduction::batchmean}), zeros({5, 4}),
             Batch(zeros({5, 4})).with_batch_dim(1));
       },
       {"batchmean", "dimension 1"}},
      {"ctc_concatenated",
       [] {
         use(losses::ctc(), zeros({5, 4, 3}),
             Batch::tuple({labels({8}), labels({4}), labels({4})}));
       },
       {"ctc_loss", "[8]", "pad_ctc_targets"}},
      {"ctc_batch_first",
       [] {
         use(losses::ctc(), zeros({4, 5, 3}),
             Batch::tuple({labels({4, 2}), labels({4}), labels({4})}));
       },
       {"(T, N, C)", "[4, 5, 3], [4, 2], [4], [4]"}},
      {"ctc_lengths_scalar",
       [] {
         use(losses::ctc(), zeros({5, 4, 3}),
             Batch::tuple({labels({4, 2}), labels({}), labels({4})}));
       },
       {"lengths (N)"}},
      {"pad_ctc_sum",
       [] { losses::pad_ctc_targets(labels({5}), at::full({2}, 3, at::kLong)); },
       {"2 targets add up to 6", "5 labels"}},
      {"pad_ctc_rank", [] { losses::pad_ctc_targets(labels({5, 2}), labels({2})); }, {"[5, 2]"}},
      {"pad_ctc_negative",
       [] { losses::pad_ctc_targets(labels({1}), at::tensor({int64_t{2}, int64_t{-1}})); },
       {"-1"}},
  };
}

std::vector<Misuse> argument_misuses() {
  return {
      {"no_targets",
       [] { use(losses::mse(), zeros({4}), Batch()); },
       {"mse_loss", "needs targets"}},
      {"no_targets_in_the_sum",
       [] { losses::mse(Reduction::sum).sum(zeros({4}), Batch()); },
       {"(input; target)", "1 tensor(s) of outputs and 0 of targets"}},
      {"two_outputs",
       [] { use(losses::mse(), Batch::tuple({zeros({4}), zeros({4})}), zeros({4})); },
       {"mse_loss takes", "2 tensor(s) of outputs and 1 of targets"}},
      {"two_outputs_for_cross_entropy",
       [] { use(losses::cross_entropy(), Batch::tuple({zeros({4, 3}), zeros({4})}), labels({4})); },
       {"cross_entropy takes", "2 tensor(s)"}},
      {"gaussian_without_variance",
       [] { use(losses::gaussian_nll(), zeros({4, 3}), zeros({4, 3})); },
       {"(mean, variance; target)", "(mean; target, variance)"}},
      {"ctc_without_lengths",
       [] { use(losses::ctc(), zeros({5, 4, 3}), labels({4, 2})); },
       {"input_lengths", "1 tensor(s) of outputs and 1 of targets"}},
      {"reduction_none", [] { parse_reduction("none"); }, {"'none'", "'mean' or 'sum'"}},
      {"reduction_unknown", [] { parse_reduction("median"); }, {"'median'"}},
      {"batchmean_elsewhere", [] { losses::mse(Reduction::batchmean); }, {"mse_loss", "kl_div"}},
      {"batchmean_cross_entropy",
       [] { losses::cross_entropy({.reduction = Reduction::batchmean}); },
       {"cross_entropy", "batchmean"}},
      {"label_smoothing",
       [] { losses::cross_entropy({.label_smoothing = 1.5}); },
       {"label_smoothing", "1.5"}},
      {"multi_margin_p", [] { losses::multi_margin({.p = 3}); }, {"p must be 1 or 2, not 3"}},
      {"separable_without_sum", [] { losses::separable(nullptr, nullptr); }, {"sum"}},
      {"separable_not_reduced",
       [] {
         losses::separable([](const Batch& o, const Batch&) { return o.tensor(); }, nullptr)
             .sum(zeros({4}), {});
       },
       {"separable", "[4]", ".sum()"}},
      {"separable_nothing",
       [] {
         losses::separable([](const Batch&, const Batch&) { return at::Tensor(); }, nullptr)
             .sum(zeros({4}), {});
       },
       {"no tensor"}},
      {"denominator_not_reduced",
       [] {
         losses::separable([](const Batch& o, const Batch&) { return o.tensor().sum(); },
                           [](const Batch& t, int64_t) { return DenominatorPart(t.tensor()); })
             .denominator(zeros({4}), 4);
       },
       {"denominator", "[4]"}},
      {"penalty_nothing", [] { losses::mse().with_penalty(nullptr); }, {"with_penalty"}},
  };
}

class EveryMisuse : public ::testing::TestWithParam<Misuse> {};

TEST_P(EveryMisuse, IsRefusedByName) {
  try {
    GetParam().call();
    FAIL() << "nothing was thrown";
  } catch (const InvalidArgument& error) {
    for (const std::string& part : GetParam().message) {
      EXPECT_NE(std::string(error.what_without_backtrace()).find(part), std::string::npos)
          << "'" << part << "' is missing in: " << error.what_without_backtrace();
    }
  }
}

std::string name_of(const ::testing::TestParamInfo<Misuse>& info) {
  return info.param.name;
}
INSTANTIATE_TEST_SUITE_P(Shapes, EveryMisuse, ::testing::ValuesIn(shape_misuses()), name_of);
INSTANTIATE_TEST_SUITE_P(Coupling, EveryMisuse, ::testing::ValuesIn(coupling_misuses()), name_of);
INSTANTIATE_TEST_SUITE_P(Arguments, EveryMisuse, ::testing::ValuesIn(argument_misuses()), name_of);

}  // namespace
}  // namespace infinitybatch
