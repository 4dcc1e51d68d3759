#pragma once

#include "plan/learned.hpp"
#include "plan/request.hpp"

#include <cstdint>
#include <optional>
#include <string>

// What is said where nothing fits.
namespace infinitybatch::plan {

/// The least that a step is predicted to need whose sizes probes have shown, and whose loss, if it
/// is computed on the outputs of all, has run: a smaller micro-batch may take other kernels, and
/// another loss another room. Nothing where there is none.
std::optional<int64_t> smallest_budget(const Request& request, const Learned& learned);

/// `what` does not fit, and nobody knows what would.
/// \param needed what would have been live, in bytes; 0 where it is not known
[[noreturn]] void refuse(const Request& request, int64_t needed, const std::string& what);
/// The smallest plan does not fit: with the least that would, where memory is known.
[[noreturn]] void refuse_smallest(const Request& request, const Learned& learned, int64_t needed);
/// No size above those on which forward fails does.
[[noreturn]] void refuse_larger(const Request& request, int64_t needed);

}  // namespace infinitybatch::plan
