#pragma once

#include "coupled/draw_laws.hpp"
#include "execute/output_law.hpp"
#include "execute/rows_seen.hpp"
#include "execute/trimming.hpp"

#include <cstdint>
#include <optional>
#include <vector>

namespace infinitybatch {

/// What steps have found out about a kind of batch. A step works on a copy, which is kept once the
/// step has succeeded: what one step refuses the next one refuses too.
struct Findings {
  bool examined = false;            ///< it is known that ordinary ops mix no samples
  bool recordings_checked = false;  ///< a recording was compared with the same forward's second one
  bool reduce_checked = false;      ///< outputs are the sums, or means, that `reduce` says
  bool targets_checked = false;     ///< targets flatten time and batch as outputs do, or not at all
  RowsSeen rows_seen;
  OutputLaw output_law;  ///< of a model with a coupled loss; without leaves: not known yet
  /// Of each sequence that is trimmed; none where no row was compared with itself in full yet.
  std::vector<std::optional<Trimming::Outputs>> trimmed_outputs;
  int64_t trimmed_steps = 0;    ///< so far; in 1, 2, 4, 8, … rows are compared again
  coupled::DrawLaws draw_laws;  ///< with `match_native_rng`
};

}  // namespace infinitybatch
