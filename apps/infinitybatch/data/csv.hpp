#pragma once

#include "data/dataset.hpp"
#include "data/labelled.hpp"

#include <string>

namespace infinitybatch::app {

/// Reads a .csv or .tsv file of numbers with a column of classes: whole numbers, or names, which
/// are numbered in alphabetical order. Which column that is, `options.labels` says by its name or
/// its position (from 1, or from -1 at the end), else a name that is usual (label, class, target,
/// y). The first line holds names where none of its fields is a number, unless `options.csv_header`
/// says.
/// \param known   whose classes and columns count: names keep their numbers, columns are taken by
/// name
/// \return features as float64, [n, columns - 1]
/// \throws DataError with the line where something else stands; UsageError where it is not clear
///         what is meant
Labelled read_csv(const std::string& path, const DataOptions& options, const Encoding* known);

}  // namespace infinitybatch::app
