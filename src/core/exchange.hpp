#pragma once

#include <infinitybatch/core/batch.hpp>

#include <cstdint>
#include <optional>
#include <vector>

namespace infinitybatch {

/// How to find out whether samples are mixed: the same computation three times, on the samples as
/// they are, with all but one exchanged for copies of that one, and with that one exchanged. What
/// changes both times depends on more than one sample.
struct Exchanges {
  int64_t rows = 0;
  int64_t kept = 0;  ///< the sample that is looked at: the last one, which all that comes
                     ///< first can push out
  std::vector<int64_t> others;  ///< for each row the one that stands there: all are `kept`
  std::vector<int64_t> itself;  ///< another stands in the place of `kept`, the rest are as they are
};

/// Nothing where there are fewer than two samples, or all of them are alike.
std::optional<Exchanges> exchanges_of(const Batch& inputs, int64_t rows);

/// The rows `order` of a tensor, along `dim`.
at::Tensor exchanged(const at::Tensor& tensor, int64_t dim, const std::vector<int64_t>& order);
/// Of all leaves that have a batch dimension.
Batch exchanged(const Batch& batch, const std::vector<int64_t>& order);

/// Where two results of the same computation differ by more than rounding, 1e-4 of what stands
/// there or is usual in `a` (2e-2 in half precision): true there. Undefined where nowhere, or where
/// they cannot be compared.
/// \param parts compares so many pieces one after the other, to need less memory
at::Tensor differences(const at::Tensor& a, const at::Tensor& b, int64_t parts);

/// Whether a result of shape `sizes` mixes samples: along none of its dimensions that are as long
/// as there are rows does each sample depend on itself alone, and some element depends on `kept`
/// and on others, or a sample's place on another sample.
/// \param by_others, by_itself what `differences` gave for the two exchanges
bool mixes(const at::Tensor& by_others, const at::Tensor& by_itself, at::IntArrayRef sizes,
           const Exchanges& exchanges);

}  // namespace infinitybatch
