#pragma once

#include "plan/learned.hpp"
#include "plan/request.hpp"

#include <cstdint>
#include <optional>

namespace infinitybatch::plan {

/// Two sizes whose timelines are compared; never 1, which takes other kernels.
inline constexpr int64_t kSmallProbe = 2;
inline constexpr int64_t kLargeProbe = 4;

/// The size of the next micro-batch that runs to show what it needs; nothing where enough is known,
/// or where there is nothing to find out.
std::optional<int64_t> probe_size(const Request& request, const Learned& learned);
/// Whether a probe of `size` samples, of which `rows` are left, tells a timeline.
bool is_traced(const Request& request, const Learned& learned, int64_t size, int64_t rows);

}  // namespace infinitybatch::plan
