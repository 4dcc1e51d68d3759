// Nested batches: how they are built, named, split and joined.
#include <infinitybatch/core/batch.hpp>
#include <infinitybatch/core/batch_source.hpp>
#include <infinitybatch/core/errors.hpp>

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace infinitybatch {
namespace {

Batch nested() {
  return Batch::dict({{"ids", at::arange(10).reshape({5, 2})},
                      {"pair", Batch::tuple({at::ones({5}), Batch::list({at::zeros({5, 1})})})},
                      {"scale", Batch::object(2.5)},
                      {"places", Batch(at::ones({3, 4})).shared()}});
}

TEST(Batch, ATensorIsABatch) {
  const Batch batch = at::ones({3, 2});
  EXPECT_TRUE(batch.is_tensor());
  EXPECT_EQ(batch.tensors().size(), 1u);
  EXPECT_EQ(batch_size(batch, "inputs"), 3);
}

TEST(Batch, KeepsItsStructure) {
  const Batch batch = nested();
  EXPECT_FALSE(batch.is_tensor());
  EXPECT_EQ(batch.size(), 4u);
  EXPECT_EQ(batch.leaves().size(), 5u);
  EXPECT_EQ(batch.tensors().size(), 4u);
  EXPECT_EQ(batch["ids"].tensor().size(1), 2);
  EXPECT_EQ(batch["pair"][1][0].tensor().dim(), 2);
  EXPECT_EQ(std::any_cast<double>(batch["scale"].leaves()[0].object), 2.5);
}

TEST(Batch, NamesItsLeaves) {
  const auto structure = nested().structure();
  EXPECT_EQ(structure->leaf_name(0), "['ids']");
  EXPECT_EQ(structure->leaf_name(1), "['pair'][0]");
  EXPECT_EQ(structure->leaf_name(2), "['pair'][1][0]");
  EXPECT_EQ(structure->leaf_name(4), "['places']");
  EXPECT_EQ(Structure::leaf()->leaf_name(0), "");
}

TEST(Batch, ForeignStructuresKeepTheirNames) {
  const auto structure = Structure::foreign(std::string("a tree"), {".left", ".right"});
  const Batch batch({Leaf{at::ones({2}), {}, 0}, Leaf{at::ones({3}), {}, 0}}, structure);
  try {
    batch_size(batch, "inputs");
    FAIL();
  } catch (const BatchError& error) {
    const std::string message = error.what_without_backtrace();
    EXPECT_NE(message.find("inputs.right"), std::string::npos) << message;
    EXPECT_NE(message.find("inputs.left"), std::string::npos) << message;
  }
}

TEST(Batch, RefusesToBeWhatItIsNot) {
  EXPECT_THROW(nested().tensor(), InvalidType);
  EXPECT_THROW(nested()["missing"], InvalidArgument);
  EXPECT_THROW(nested()["pair"][2], InvalidArgument);
  EXPECT_THROW(Batch(at::ones({2})).with_batch_dim(-2), InvalidArgument);
  EXPECT_THROW(Batch({Leaf{}}, Structure::tuple({})), InvalidArgument);
}

TEST(Rows, CutEveryLeafAlongItsOwnDimension) {
  const Batch batch = Batch::tuple({at::arange(12).reshape({6, 2}),
                                    Batch(at::arange(12).reshape({2, 6})).with_batch_dim(1),
                                    Batch(at::arange(4)).shared(), Batch::object(1)});
  EXPECT_EQ(batch_size(batch, "inputs"), 6);
  const Batch part = rows(batch, 2, 5);
  EXPECT_TRUE(part[0].tensor().equal(batch[0].tensor().slice(0, 2, 5)));
  EXPECT_TRUE(part[1].tensor().equal(batch[1].tensor().slice(1, 2, 5)));
  EXPECT_TRUE(part[2].tensor().is_same(batch[2].tensor()));
  EXPECT_EQ(std::any_cast<int>(part[3].leaves()[0].object), 1);
  EXPECT_TRUE(part[0].tensor().is_alias_of(batch[0].tensor())) << "rows are views, not copies";
}

struct Bad {
  const char* name;
  std::function<Batch()> batch;
  const char* says;
};

class BadBatches : public ::testing::TestWithParam<Bad> {};

TEST_P(BadBatches, AreRefusedWithTheLeafNamed) {
  try {
    batch_size(GetParam().batch(), "inputs");
    FAIL() << "it was accepted";
  } catch (const BatchError& error) {
    const std::string message = error.what_without_backtrace();
    EXPECT_NE(message.find(GetParam().says), std::string::npos) << message;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Batch, BadBatches,
    ::testing::Values(
        Bad{"sizes_differ",
            [] { return Batch::dict({{"a", at::ones({4, 2})}, {"mask", at::ones({3, 2})}}); },
            "inputs['mask'] has 3 samples"},
        Bad{"empty", [] { return Batch(at::ones({0, 2})); }, "inputs is empty"},
        Bad{"no_dimension", [] { return Batch::tuple({at::ones({2}), at::ones({})}); },
            "inputs[1] is a 0-dimensional tensor"},
        Bad{"no_such_dimension", [] { return Batch(at::ones({3})).with_batch_dim(1); },
            "no dimension 1"},
        Bad{"nothing_to_split", [] { return Batch(at::ones({3})).shared(); }, "nothing to split"},
        Bad{"no_tensor", [] { return Batch::object(3); }, "nothing to split"},
        Bad{"no_leaf", [] { return Batch(); }, "nothing to split"}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(Concatenate, IsTheInverseOfRows) {
  const Batch whole = Batch::dict({{"first", at::randn({7, 3})},
                                   {"second", Batch(at::randn({2, 7})).with_batch_dim(1)},
                                   {"note", Batch::object(1)}});
  std::vector<Batch> parts;
  for (const auto& [begin, end] :
       std::vector<std::pair<int64_t, int64_t>>{{0, 3}, {3, 6}, {6, 7}}) {
    parts.push_back(rows(whole, begin, end));
  }
  const Batch joined = concatenate(parts, {3, 3, 1}, "outputs");
  EXPECT_TRUE(joined["first"].tensor().equal(whole["first"].tensor()));
  EXPECT_TRUE(joined["second"].tensor().equal(whole["second"].tensor()));
}

TEST(Concatenate, FindsTheDimensionThatFollowsTheRows) {
  const std::vector<Batch> parts{at::zeros({4, 3, 2}), at::ones({4, 1, 2})};
  EXPECT_EQ(concatenate(parts, {3, 1}, "outputs").tensor().sizes(),
            (std::vector<int64_t>{4, 4, 2}));
}

TEST(Concatenate, TakesASinglePartAsItIs) {
  const at::Tensor only = at::ones({3, 2});
  EXPECT_TRUE(concatenate({only}, {3}, "outputs").tensor().is_same(only));
}

TEST(Concatenate, RefusesWhatFollowsNoRows) {
  const std::vector<Batch> parts{at::zeros({}), at::zeros({})};
  EXPECT_THROW(concatenate(parts, {3, 3}, "outputs"), BatchError);
  EXPECT_THROW(concatenate({at::zeros({2, 5}), at::zeros({2, 5})}, {3, 3}, "outputs"), BatchError);
}

TEST(Source, MakesRowsAndTellsKindsApart) {
  const BatchSource source = BatchSource::from(Batch(at::arange(8).reshape({4, 2})), "inputs");
  EXPECT_EQ(source.size, 4);
  EXPECT_TRUE(source.rows(1, 3).tensor().equal(at::arange(2, 6).reshape({2, 2})));
  const auto signature = [](const Batch& batch) {
    return BatchSource::from(batch, "inputs").signature;
  };
  EXPECT_EQ(source.signature, signature(at::arange(20).reshape({10, 2})))
      << "the size is no matter";
  EXPECT_NE(source.signature, signature(at::ones({4, 2})));
  EXPECT_NE(source.signature, signature(at::arange(8).reshape({4, 2, 1})));
  const auto dims = [](const Batch& batch) { return BatchSource::from(batch, "inputs").dims; };
  EXPECT_EQ(source.signature, signature(at::arange(12).reshape({4, 3})))
      << "lengths are told by dims";
  EXPECT_EQ(source.dims, (Dims{{2}}));
  EXPECT_EQ(dims(at::arange(12).reshape({4, 3})), (Dims{{3}}));
  EXPECT_EQ(dims(Batch(at::ones({2, 4, 3})).with_batch_dim(1)), (Dims{{2, 3}}));
  EXPECT_EQ(dims(Batch::tuple({at::ones({4}), Batch(at::ones({7})).shared()})), (Dims{{}, {7}}));
  EXPECT_NE(source.signature, signature(Batch(at::arange(8).reshape({2, 4})).with_batch_dim(1)));
  EXPECT_THROW(BatchSource::from(Batch(at::ones({0})), "inputs"), BatchError);
}

}  // namespace
}  // namespace infinitybatch
