#pragma once

#include "plan/request.hpp"

#include <cstdint>
#include <vector>

// The plans that a request asks for.
namespace infinitybatch::plan {

/// Micro-batches as they are measured: in a stream, or in a rehearsal.
/// \param row of the first
Plan measured_plan(const Request& request, std::vector<int64_t> sizes, int64_t row = 0);
/// How many micro-batches are traced together: of cut tapes, where there are rows enough, a second
/// one tells what there is once.
size_t probed_micro_batches(const Request& request);

/// The whole step where there is none, and where there is.
Plan streamed_plan(const Request& request, int64_t size, bool penalty);
/// \param kept    of the samples, the last of which graphs are kept: a micro-batch in which they
///                begin becomes two
/// \param overlap of what is offloaded: copies run while other micro-batches compute
Plan two_pass_plan(const Request& request, int64_t size, int64_t kept, bool overlap);

}  // namespace infinitybatch::plan
