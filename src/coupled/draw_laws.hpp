#pragma once

#include "coupled/random_streams.hpp"
#include "coupled/whole_batch_op.hpp"
#include "tape/tape.hpp"

#include <infinitybatch/core/batch.hpp>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace infinitybatch::coupled {

/// Which dimension of a tensor, or of a size, follows the samples, and how it holds them: seen as
/// (outer, samples, inner). A plain batch dimension has `outer` and `inner` 1; [batch · time, …]
/// has `inner` = time, [time · batch, …] has `outer` = time.
struct BatchAxis {
  int64_t dim = -1;  ///< -1: none
  int64_t outer = 1;
  int64_t inner = 1;
  std::vector<bool> outside;  ///< dimensions that lie outside of it in memory
};

/// How what an op that draws is given follows the samples, by the position of the argument.
struct DrawLaw {
  std::string op;
  uint32_t place = 0;  ///< in the tape
  std::map<uint16_t, BatchAxis> axes;
};

/// One for each op of a tape that draws, in order.
struct DrawLaws {
  std::vector<DrawLaw> laws;
  size_t ops = 0;  ///< of the tape, all in all
  /// How what the tape found lies in memory (parameters that may be channels last by now): what is
  /// drawn "like" a tensor is filled in that tensor's order. Inputs are those of one program.
  std::string layouts;
  /// Whether they are for the ops of this tape: a forward that has taken another way since has
  /// others.
  bool fit(const tape::Tape& tape) const;
};

/// A recording that can be looked at.
struct DrawExample {
  const tape::Tape& tape;
  const Batch& inputs;
  int64_t rows = 0;
};

/// Finds the laws from two recordings of different numbers of rows. Where a dimension holds the
/// samples beside something else, samples are changed and the tape is played again to see where
/// they lie.
/// \throws CouplingError where an op's numbers cannot be told apart by samples
DrawLaws find_draw_laws(const DrawExample& one, const DrawExample& other);

/// `DrawLaws::layouts` of a tape.
std::string layouts_found(const tape::Tape& tape);

/// Ops of the tape that draw.
std::vector<uint32_t> drawing_ops(const tape::Tape& tape);

/// \throws CouplingError where an op draws whose numbers for the whole batch are not known: a fused
/// one, one that permutes; or where something that is no op has moved a generator
void check_draws(const tape::Tape& tape);

/// Stands in for an op that draws: gives each micro-batch its rows of what the whole batch's run
/// draws. Where it is known that pieces drawn one after the other are the whole (on the CPU, with
/// the samples outermost in memory) each micro-batch draws its own from where the one before left
/// off; otherwise numbers for the whole batch are drawn at `combine` and kept. Numbers whose shape
/// does not follow the batch are one draw for all. `apply` has to be called in the order of the
/// rows the first time.
/// \param law null where one micro-batch is the whole batch
std::unique_ptr<WholeBatchOp> draw_stand_in(const tape::Tape& tape, const tape::Op& op,
                                            const DrawLaw* law,
                                            std::shared_ptr<RandomStreams> streams);

}  // namespace infinitybatch::coupled
