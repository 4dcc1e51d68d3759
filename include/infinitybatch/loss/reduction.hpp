#pragma once

#include <cstdint>
#include <string_view>

namespace infinitybatch {

/// How a criterion turns the samples' losses into one number. torch's 'none' is missing: it gives
/// no one number, so nothing could be differentiated.
enum class Reduction : uint8_t {
  mean,       ///< divided by the criterion's own denominator
  sum,        ///< not divided
  batchmean,  ///< divided by the number of samples; `kl_div` alone knows it
};

/// torch's name of a reduction.
/// \throws InvalidArgument for "none", and for a name that torch doesn't know
Reduction parse_reduction(std::string_view name);

}  // namespace infinitybatch
