// Every micro-batch starts from the step's buffers; what all leave alike is written once.
#include "execute/buffer_rule.hpp"

#include <infinitybatch/core/errors.hpp>

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace infinitybatch {
namespace {

/// A slot that holds a tensor and lets it be replaced, as Python modules do.
struct Place {
  at::Tensor tensor = at::zeros({3});
  BufferSlot slot() {
    return {"place", [this] { return tensor; },
            [this](const at::Tensor& value) { tensor = value; }};
  }
};

TEST(BufferRule, LeavesUntouchedBuffersAlone) {
  Place place;
  const at::Tensor object = place.tensor;
  const uint32_t version = object._version();
  BufferRule rule({place.slot()}, true);
  rule.end_micro_batch();
  rule.end_micro_batch();
  rule.commit();
  EXPECT_TRUE(place.tensor.is_same(object));
  EXPECT_EQ(object._version(), version);
}

TEST(BufferRule, EachMicroBatchStartsFromTheStepsValues) {
  Place place;
  BufferRule rule({place.slot()}, true);
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(place.tensor.equal(at::zeros({3}))) << i;
    place.tensor.add_(1);
    rule.end_micro_batch();
  }
  EXPECT_TRUE(place.tensor.equal(at::zeros({3}))) << "nothing is written before the commit";
  rule.commit();
  EXPECT_TRUE(place.tensor.equal(at::ones({3})));
}

TEST(BufferRule, KeepsTheTensorObjectThatIsWrittenInPlace) {
  Place place;
  const at::Tensor object = place.tensor;
  BufferRule rule({place.slot()}, true);
  place.tensor.add_(1);
  rule.end_micro_batch();
  rule.commit();
  EXPECT_TRUE(place.tensor.is_same(object));
}

TEST(BufferRule, HandsOnATensorThatWasPutInItsPlace) {
  Place place;
  const at::Tensor object = place.tensor;
  BufferRule rule({place.slot()}, true);
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(place.tensor.is_same(object)) << i;
    place.tensor = at::full({4}, 2.0);
    rule.end_micro_batch();
  }
  rule.commit();
  EXPECT_TRUE(place.tensor.equal(at::full({4}, 2.0)));
  EXPECT_TRUE(object.equal(at::zeros({3}))) << "the old tensor may be someone else's";
}

struct Disagreement {
  const char* name;
  std::function<void(Place&, int micro_batch)> write;
};

class Disagreements : public ::testing::TestWithParam<Disagreement> {};

TEST_P(Disagreements, AreRefusedByNameAndRolledBack) {
  Place place;
  const at::Tensor object = place.tensor;
  BufferRule rule({place.slot()}, true);
  for (int i = 0; i < 3; ++i) {
    GetParam().write(place, i);
    rule.end_micro_batch();
  }
  try {
    rule.commit();
    FAIL() << "it was accepted";
  } catch (const CouplingError& error) {
    EXPECT_EQ(error.op(), "place");
  }
  rule.roll_back();
  EXPECT_TRUE(place.tensor.is_same(object));
  EXPECT_TRUE(place.tensor.equal(at::zeros({3})));
}

INSTANTIATE_TEST_SUITE_P(
    BufferRule, Disagreements,
    ::testing::Values(
        Disagreement{"other_values", [](Place& place, int i) { place.tensor.add_(i + 1); }},
        Disagreement{"one_bit",
                     [](Place& place, int i) { place.tensor.fill_(i == 2 ? -0.0 : 0.0); }},
        Disagreement{"only_the_first",
                     [](Place& place, int i) {
                       if (i == 0) place.tensor.add_(1);
                     }},
        Disagreement{"only_the_last",
                     [](Place& place, int i) {
                       if (i == 2) place.tensor.add_(1);
                     }},
        Disagreement{"not_the_last",
                     [](Place& place, int i) {
                       if (i < 2) place.tensor.add_(1);
                     }},
        Disagreement{"another_shape",
                     [](Place& place, int i) { place.tensor = at::zeros({i + 1}); }},
        Disagreement{"another_type",
                     [](Place& place, int i) {
                       place.tensor = at::zeros({3}, i == 1 ? at::kDouble : at::kFloat);
                     }}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(BufferRule, NaNEqualsNaN) {
  Place place;
  BufferRule rule({place.slot()}, true);
  for (int i = 0; i < 2; ++i) {
    place.tensor.fill_(NAN);
    rule.end_micro_batch();
  }
  EXPECT_NO_THROW(rule.commit());
  EXPECT_TRUE(place.tensor.isnan().all().item<bool>());
}

TEST(BufferRule, RollsBackInTheMiddleOfAMicroBatch) {
  Place place;
  const at::Tensor object = place.tensor;
  BufferRule rule({place.slot()}, true);
  place.tensor.add_(1);
  rule.end_micro_batch();
  place.tensor.add_(5);
  place.tensor = at::ones({9});
  rule.roll_back();
  EXPECT_TRUE(place.tensor.is_same(object));
  EXPECT_TRUE(place.tensor.equal(at::zeros({3})));
}

TEST(BufferRule, RollsBackWhatWasCommitted) {
  Place place;
  BufferRule rule({place.slot()}, true);
  place.tensor.add_(1);
  rule.end_micro_batch();
  rule.commit();
  rule.roll_back();
  EXPECT_TRUE(place.tensor.equal(at::zeros({3})));
}

TEST(BufferRule, WithoutExactnessBuffersCarryOn) {
  Place place;
  BufferRule rule({place.slot()}, false);
  for (int i = 1; i <= 3; ++i) {
    place.tensor.add_(i);
    rule.end_micro_batch();
  }
  rule.commit();
  EXPECT_TRUE(place.tensor.equal(at::full({3}, 6.0)));
  rule.roll_back();
  EXPECT_TRUE(place.tensor.equal(at::zeros({3}))) << "a failed step still leaves nothing behind";
}

TEST(BufferRule, AcceptsEveryKindOfBuffer) {
  std::vector<at::Tensor> tensors{at::zeros({}, at::kLong),
                                  at::zeros({2, 3}, at::kBool),
                                  at::zeros({0}),
                                  at::zeros({2, 2}, at::kComplexDouble),
                                  at::zeros({4, 4}).t().slice(0, 0, 4, 2),
                                  at::Tensor()};
  std::vector<BufferSlot> slots;
  for (at::Tensor& tensor : tensors) {
    slots.push_back({"slot", [&tensor] { return tensor; },
                     [&tensor](const at::Tensor& value) { tensor = value; }});
  }
  BufferRule rule(slots, true);
  for (int i = 0; i < 2; ++i) {
    for (at::Tensor& tensor : tensors) {
      if (tensor.defined()) tensor.fill_(1);
    }
    rule.end_micro_batch();
  }
  rule.commit();
  for (const at::Tensor& tensor : tensors) {
    EXPECT_TRUE(!tensor.defined() || tensor.equal(at::ones_like(tensor)));
  }
}

}  // namespace
}  // namespace infinitybatch
