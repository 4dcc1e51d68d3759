#pragma once

#include "coupled/renormed_weights.hpp"
#include "execute/problem.hpp"
#include "execute/strategy.hpp"

namespace infinitybatch {

struct Findings;
struct StaticTapes;
class Checkpoints;
namespace offload {
class Store;
}

/// What a strategy works with, which outlives the step.
struct Resources {
  Findings* findings = nullptr;         ///< about this kind of batch; never null while a step runs
  offload::Store* store = nullptr;      ///< where `Strategy::offloads` moves things
  StaticTapes* static_tapes = nullptr;  ///< with `Strategy::reuses_tapes`
  Checkpoints* checkpoints = nullptr;   ///< with `Strategy::checkpoints`: where to cut
  coupled::RenormedMemory* renormed = nullptr;  ///< what is known of `max_norm`; may be null
};

/// One logical batch: what is computed, how, and with what.
struct Setup {
  Problem problem;
  Strategy strategy;
  Resources resources;
};

/// Whether each micro-batch's graph is used at once: forward runs once, and nothing is recorded for
/// backward.
inline bool streams(const Problem& problem, const Strategy& strategy) noexcept {
  return problem.loss.separable() != nullptr && !strategy.is_cut();
}

}  // namespace infinitybatch
