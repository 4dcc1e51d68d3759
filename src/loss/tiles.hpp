#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <optional>
#include <string>

// What losses share that walk a matrix of scores in tiles of rows.
namespace infinitybatch::losses {

/// Rows whose scores are held at once where the user says nothing: as many as take the bytes of the
/// columns themselves (so that the tile adds no new order of memory), or 1 MiB where that is more;
/// at most 256, where products of matrices are as fast as they get.
/// \param columns  scores of one row
/// \param features of one column
/// \param itemsize bytes of a score
int64_t default_tile(int64_t columns, int64_t features, int64_t itemsize);

/// The user's number of rows or the default; never more than there are rows, never less than 1.
/// \throws InvalidArgument for a number below 1
int64_t rows_of_tile(const std::string& name, std::optional<int64_t> wanted, int64_t rows,
                     int64_t columns, int64_t features, int64_t itemsize);

/// \throws InvalidArgument for a number below 1
void check_tile(const std::string& name, std::optional<int64_t> tile);

/// Types are chosen by hand while this lives, not by autocast.
class NoAutocast {
 public:
  NoAutocast() : guard_(c10::autocast_dispatch_keyset) {}

 private:
  c10::impl::ExcludeDispatchKeyGuard guard_;
};

}  // namespace infinitybatch::losses
