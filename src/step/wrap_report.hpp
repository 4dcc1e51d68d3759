#pragma once

#include "step/wrapped_call.hpp"

#include <cstdint>
#include <memory>
#include <vector>

namespace infinitybatch {

/// What a call did so far, for people.
std::shared_ptr<WrapReport> report_of(const WrappedCall& call, const std::vector<int64_t>& sizes);

struct MeasuredPeak {
  int64_t bytes = 0;    ///< of the call
  int64_t of_plan = 0;  ///< without its rehearsals
  /// It looked at rows or rehearsed, which no plan knows of and which may take more.
  bool beside_plan = false;
};

void report_peak(WrapReport& report, const Plan& plan, const MeasuredPeak& peak);

/// Makes `report` the last one of `wrapped`.
void publish(Wrapped& wrapped, std::shared_ptr<WrapReport> report);

}  // namespace infinitybatch
