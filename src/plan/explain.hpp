#pragma once

#include "plan/kinds.hpp"
#include "plan/request.hpp"

#include <infinitybatch/execute/plan.hpp>

namespace infinitybatch::plan {

/// Adds what `Plan::explain()` prints: candidates, times, and why the size was chosen.
/// \param kinds   that have chosen for `request`
/// \param settled the plan will not change any more
void explain(Plan& plan, const Request& request, const Kinds& kinds, bool settled);

}  // namespace infinitybatch::plan
