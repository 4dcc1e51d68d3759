#pragma once

#include "execute/trimming.hpp"

#include <infinitybatch/core/batch_source.hpp>

#include <functional>
#include <memory>
#include <optional>

// Rows of a source in the order of their lengths, without the source ever being read as a whole.
namespace infinitybatch {

/// All rows of a source as far as their lengths need them: leaves that `tells` names in full, of
/// others the shapes alone. Read in pieces of about a MiB. Nothing where pieces have rows of other
/// shapes, as those have that a collate function pads: then lengths do not tell how a row comes.
std::optional<Batch> survey(const BatchSource& source,
                            const std::function<bool(const Batch&, size_t leaf)>& tells);

/// Rows in sorted order, read from `given` as they are asked for: neighbours together, in memory of
/// their own.
/// \param dims of a row, as the survey has seen it
BatchSource sorted_rows(const BatchSource& given, const Dims& dims,
                        std::shared_ptr<const Trimming> trimming);

}  // namespace infinitybatch
