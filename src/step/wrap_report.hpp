#pragma once

#include "step/wrapped_call.hpp"

#include <cstdint>
#include <memory>
#include <vector>

namespace infinitybatch {

/// What a call did so far, for people.
std::shared_ptr<WrapReport> report_of(const WrappedCall& call, const std::vector<int64_t>& sizes);

/// Makes `report` the last one of `wrapped`.
void publish(Wrapped& wrapped, std::shared_ptr<WrapReport> report);

}  // namespace infinitybatch
