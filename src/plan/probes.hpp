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
/// With lengths, before there is a profile: the first row from `row` on where samples are traced,
/// and what they are computed at. Sizes are compared at one length, of which four rows are taken to
/// fit.
struct AtLength {
  int64_t row = 0;
  int64_t length = 0;
};
AtLength where_to_probe(const Request& request, const Learned& learned, int64_t row);
/// Whether there are rows enough.
bool may_probe_at_length(const Request& request, const Learned& learned);

/// With lengths: the rows from `row` on whose trace would tell how a micro-batch's bytes follow its
/// length, and what they are computed at. Three lengths tell all others; more are wanted far away
/// from them, and where a prediction was wrong. Never a step's first micro-batch, which does what
/// is done once. Nothing where enough is known.
std::optional<AtLength> length_to_learn(const Request& request, const Learned& learned,
                                        int64_t row);
/// Whether a probe of `size` samples, of which `rows` are left, tells a timeline.
bool is_traced(const Request& request, const Learned& learned, int64_t size, int64_t rows);

}  // namespace infinitybatch::plan
