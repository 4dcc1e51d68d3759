// A strategy is a value: it can be compared, printed, and says what it takes.
#include "execute/strategy.hpp"

#include <gtest/gtest.h>

namespace infinitybatch {
namespace {

TEST(Strategy, IsComparedByWhatItDoes) {
  Strategy one;
  Strategy other;
  EXPECT_EQ(one, other);
  other.cut(/*at_whole_batch_ops=*/true, /*for_memory=*/false);
  EXPECT_NE(one, other);
  one.cuts = Strategy::Cuts::whole_batch_ops;
  EXPECT_EQ(one, other);
  other.offload = Strategy::Offloads::boundaries;
  EXPECT_NE(one, other);
}

TEST(Strategy, CutsForMemoryAloneLeaveMicroBatchesByThemselves) {
  Strategy strategy;
  EXPECT_FALSE(strategy.is_cut());
  strategy.cut(/*at_whole_batch_ops=*/false, /*for_memory=*/true);
  EXPECT_TRUE(strategy.is_cut() && strategy.checkpoints() && strategy.per_micro_batch());
  strategy.cut(/*at_whole_batch_ops=*/true, /*for_memory=*/true);
  EXPECT_TRUE(strategy.is_cut() && strategy.checkpoints());
  EXPECT_FALSE(strategy.per_micro_batch());
  strategy.cut(/*at_whole_batch_ops=*/true, /*for_memory=*/false);
  EXPECT_TRUE(strategy.is_cut());
  EXPECT_FALSE(strategy.checkpoints());
}

TEST(Strategy, WhatWasAskedForIsNoMismatch) {
  Strategy strategy;
  strategy.use_tapes(/*asked=*/true, /*work=*/true);
  EXPECT_TRUE(strategy.replays());
  strategy.use_tapes(/*asked=*/true, /*work=*/false);
  EXPECT_EQ(strategy.second_forward, Strategy::SecondForward::rerun_after_mismatch);
  strategy.use_tapes(/*asked=*/false, /*work=*/false);
  EXPECT_EQ(strategy.second_forward, Strategy::SecondForward::rerun);
  EXPECT_FALSE(strategy.replays());
}

TEST(Strategy, IsPrinted) {
  Strategy strategy;
  EXPECT_EQ(strategy.text(), "whole micro-batches");
  strategy.offload = Strategy::Offloads::graphs;
  EXPECT_EQ(strategy.text(), "whole micro-batches, offloads boundary activations and graphs");
  strategy = Strategy();
  strategy.cut(/*at_whole_batch_ops=*/true, /*for_memory=*/true);
  strategy.offload = Strategy::Offloads::boundaries;
  EXPECT_EQ(strategy.text(),
            "cut at whole-batch ops and for memory, offloads boundary activations");
}

}  // namespace
}  // namespace infinitybatch
