#pragma once

#include "plan/candidates.hpp"
#include "plan/learned.hpp"
#include "plan/request.hpp"

#include <cstdint>
#include <vector>

namespace infinitybatch::plan {

/// The micro-batches of a step's next piece: those whose memory has to be traced or whose time has
/// to be measured, else all rows that are left. Empty where a rehearsal has to begin anew.
/// \param from  how far the step is
/// \param piece is told what is measured
std::vector<int64_t> next_sizes(const Request& request, const Learned& learned,
                                const Candidates::Progress& from, Piece& piece);

}  // namespace infinitybatch::plan
