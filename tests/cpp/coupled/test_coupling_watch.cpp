// Every way in which a model can mix samples in the op stream, and what looks like one but is none.
#include "coupled/coupling_watch.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace infinitybatch::coupled {
namespace {

namespace nn = torch::nn;

struct Row {
  const char* name;
  std::function<void()> run;
  const char* op;  ///< empty: nothing must be found
};

const at::Tensor& images() {
  static const at::Tensor tensor = at::randn({4, 3, 5, 5});
  return tensor;
}

at::Tensor weight() {
  return at::ones({3}).requires_grad_();
}

std::vector<Row> rows() {
  const at::Tensor none;
  return {
      {"batch_norm_module", [] { nn::BatchNorm2d(3)(images()); }, "aten::batch_norm"},
      {"batch_norm_module_eval",
       [] {
         nn::BatchNorm2d norm(3);
         norm->eval();
         norm(images());
       },
       ""},
      {"batch_norm_without_statistics_in_eval",
       [] {
         nn::BatchNorm2d norm(nn::BatchNorm2dOptions(3).track_running_stats(false));
         norm->eval();
         norm(images());
       },
       "aten::batch_norm"},
      {"batch_norm_one_dimension", [] { nn::BatchNorm1d(3)(at::randn({4, 3})); },
       "aten::batch_norm"},
      {"native_batch_norm",
       [=] { at::native_batch_norm(images(), weight(), none, none, none, true, 0.1, 1e-5); },
       "aten::native_batch_norm"},
      {"native_batch_norm_with_given_statistics",
       [=] {
         at::native_batch_norm(images(), weight(), none, at::zeros({3}), at::ones({3}), false, 0.1,
                               1e-5);
       },
       ""},
      {"legit_batch_norm",
       [=] { at::_native_batch_norm_legit(images(), weight(), none, true, 0.1, 1e-5); },
       "aten::_native_batch_norm_legit"},
      {"no_update",  // which is how inference is spelled there
       [=] {
         at::_batch_norm_no_update(images(), none, none, at::zeros({3}), at::ones({3}), 0.1, 1e-5);
       },
       ""},
      {"update_stats", [=] { at::batch_norm_update_stats(images(), none, none, 0.1); },
       "aten::batch_norm_update_stats"},
      {"instance_norm", [] { nn::InstanceNorm2d(3)(images()); }, ""},
      {"instance_norm_then_batch_norm",
       [] {
         nn::InstanceNorm2d(3)(images());
         nn::BatchNorm2d(3)(images());
       },
       "aten::batch_norm"},
      {"instance_norm_that_fails_then_batch_norm",
       [=] {
         EXPECT_ANY_THROW(
             at::instance_norm(images(), at::ones({7}), none, none, none, true, 0.1, 1e-5, false));
         nn::BatchNorm2d(3)(images());
       },
       "aten::batch_norm"},
      {"group_norm", [] { nn::GroupNorm(1, 3)(images()); }, ""},
      {"layer_norm", [] { nn::LayerNorm(nn::LayerNormOptions({5}))(images()); }, ""},
      {"embedding", [] { nn::Embedding(4, 2)(at::arange(3)); }, ""},
      {"embedding_scaled_by_frequency",
       [] { nn::Embedding(nn::EmbeddingOptions(4, 2).scale_grad_by_freq(true))(at::arange(3)); },
       "aten::embedding"},
      {"frozen_embedding_scaled_by_frequency",
       [] {
         nn::Embedding words(nn::EmbeddingOptions(4, 2).scale_grad_by_freq(true));
         words->weight.set_requires_grad(false);
         words(at::arange(3));
       },
       ""},
      {"embedding_bag_scaled_by_frequency",
       [] {
         nn::EmbeddingBag(nn::EmbeddingBagOptions(4, 2).scale_grad_by_freq(true).mode(torch::kSum))(
             at::arange(4).reshape({2, 2}));
       },
       "aten::embedding_bag"},
      {"embedding_with_max_norm",
       [] { nn::Embedding(nn::EmbeddingOptions(4, 2).max_norm(0.1))(at::arange(3)); },
       "aten::embedding_renorm_"},
      {"under_no_grad",
       [] {
         const at::NoGradGuard no_grad;
         nn::BatchNorm2d(3)(images());
       },
       "aten::batch_norm"},
  };
}

class Watched : public ::testing::TestWithParam<Row> {};

TEST_P(Watched, FindsWhatCouplesAndNothingElse) {
  CouplingWatch watch;
  {
    const CouplingWatch::Scope scope(watch);
    GetParam().run();
  }
  EXPECT_EQ(watch.found() ? watch.found()->op : "", GetParam().op);
  EXPECT_TRUE(!watch.found() || !watch.found()->why.empty());
}

INSTANTIATE_TEST_SUITE_P(CouplingWatch, Watched, ::testing::ValuesIn(rows()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(CouplingWatch, SeesNothingOutsideOfItsScope) {
  CouplingWatch watch;
  nn::BatchNorm2d(3)(images());
  {
    const CouplingWatch::Scope scope(watch);
  }
  nn::BatchNorm2d(3)(images());
  EXPECT_FALSE(watch.found().has_value());
}

TEST(CouplingWatch, TheInnermostOfNestedScopesSees) {
  CouplingWatch outer, inner;
  const CouplingWatch::Scope first(outer);
  {
    const CouplingWatch::Scope second(inner);
    nn::BatchNorm2d(3)(images());
  }
  EXPECT_FALSE(outer.found().has_value());
  EXPECT_TRUE(inner.found().has_value());
  nn::BatchNorm2d(3)(images());
  EXPECT_TRUE(outer.found().has_value());
}

TEST(CouplingWatch, NamesTheFirstOfSeveral) {
  CouplingWatch watch;
  const CouplingWatch::Scope scope(watch);
  nn::Embedding(nn::EmbeddingOptions(4, 2).max_norm(0.1))(at::arange(3));
  nn::BatchNorm2d(3)(images());
  EXPECT_EQ(watch.found()->op, "aten::embedding_renorm_");
}

TEST(CouplingWatch, PutsRewrittenWeightsBackToBeforeTheFirstTime) {
  nn::Embedding words(nn::EmbeddingOptions(4, 2).max_norm(0.3));
  const at::Tensor before = words->weight.detach().clone();
  CouplingWatch watch;
  {
    const CouplingWatch::Scope scope(watch);
    words(at::tensor({0, 1}));
    words(at::tensor({2, 3}));
  }
  ASSERT_FALSE(words->weight.equal(before));
  watch.renormed()->undo();
  EXPECT_TRUE(words->weight.equal(before));
}

/// A model's own embedding: its weight is known.
struct Words {
  nn::Embedding module{nn::EmbeddingOptions(4, 2).max_norm(0.3)};
  CouplingWatch watch;

  Words() { watch.know_parameters({{"weight", module->weight}}); }
  void look_up(const at::Tensor& indices) {
    const CouplingWatch::Scope scope(watch);
    module(indices);
  }
};

TEST(RenormedWeights, LookupsOfAParameterCoupleNothing) {
  Words words;
  const at::Tensor before = words.module->weight.detach().clone();
  words.look_up(at::tensor({0, 1}));
  words.look_up(at::tensor({1, 2, 2}).reshape({3, 1}));
  EXPECT_FALSE(words.watch.found().has_value());
  EXPECT_FALSE(words.watch.renormed()->empty());
  const at::Tensor scaled = words.module->weight.detach().clone();
  EXPECT_FALSE(scaled.slice(0, 0, 3).equal(before.slice(0, 0, 3)));
  EXPECT_TRUE(scaled[3].equal(before[3]));
  words.watch.renormed()->undo();
  EXPECT_TRUE(words.module->weight.equal(before));
}

TEST(RenormedWeights, OnlyTheFirstScalingRaisesTheVersion) {
  Words words;
  const int64_t before = words.module->weight._version();
  words.look_up(at::tensor({0, 1}));
  const int64_t after = words.module->weight._version();
  EXPECT_GT(after, before);
  words.look_up(at::tensor({2, 3}));
  EXPECT_EQ(words.module->weight._version(), after);
  words.watch.renormed()->undo();
  EXPECT_EQ(words.module->weight._version(), before);
}

TEST(RenormedWeights, ScaledRowsStayAsTheyAre) {
  Words words;
  words.look_up(at::tensor({0, 1}));
  {
    const at::NoGradGuard no_grad;
    words.module->weight[0].mul_(7);  // as if rounding had made it too long, if more so
  }
  const at::Tensor row = words.module->weight.detach()[0].clone();
  words.look_up(at::tensor({0, 2}));
  EXPECT_TRUE(words.module->weight.detach()[0].equal(row));
  EXPECT_LE(words.module->weight.detach()[2].norm().item<float>(), 0.31F);
}

TEST(RenormedWeights, WhoElseReadsTheWeightIsNamed) {
  Words words;
  words.look_up(at::tensor({0, 1}));
  {
    const CouplingWatch::Scope scope(words.watch);
    words.module->weight.t().slice(0, 0, 1).detach();  // views read nothing
    EXPECT_FALSE(words.watch.found().has_value());
    at::linear(at::ones({1, 2}), words.module->weight);
  }
  ASSERT_TRUE(words.watch.found().has_value());
  EXPECT_EQ(words.watch.found()->op, "aten::embedding_renorm_");
  EXPECT_NE(words.watch.found()->why.find("aten::linear"), std::string::npos);
}

TEST(RenormedWeights, LookupsOfOtherRowsAreReads) {
  Words words;
  words.look_up(at::tensor({0, 1}));
  const CouplingWatch::Scope scope(words.watch);
  at::embedding(words.module->weight, at::tensor({0, 1}));
  EXPECT_TRUE(words.watch.found().has_value());
}

TEST(RenormedWeights, TwoNormsOfOneWeightCouple) {
  Words words;
  words.look_up(at::tensor({0, 1}));
  const CouplingWatch::Scope scope(words.watch);
  const at::NoGradGuard no_grad;
  at::embedding_renorm_(words.module->weight, at::tensor({0, 1}), 0.2, 2.0);
  EXPECT_TRUE(words.watch.found().has_value());
}

}  // namespace
}  // namespace infinitybatch::coupled
