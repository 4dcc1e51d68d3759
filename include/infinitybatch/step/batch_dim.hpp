#pragma once

#include <infinitybatch/core/batch.hpp>

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <string>
#include <utility>
#include <variant>

namespace infinitybatch {

/// Along which dimension samples lie in inputs and targets that are not marked themselves
/// (`Batch::with_batch_dim`, `Batch::shared`).
///
///     BatchDim time_first = 1;
///     BatchDim by_argument = {{"source", 1}, {"mask", Leaf::kShared}};
///
/// One number is for every tensor of which that dimension has the batch's size. By argument it is
/// for all tensors of that argument, and others have their samples first: an argument is a name of
/// a dict, a position of a tuple ("0", which is a single tensor, too), or "targets".
class BatchDim {
 public:
  using ByArgument = std::map<std::string, int64_t>;

  /// \throws InvalidArgument for a negative dimension
  template <std::integral Number>
  BatchDim(Number dim) : BatchDim(std::variant<int64_t, ByArgument>(static_cast<int64_t>(dim))) {}
  /// \throws InvalidArgument for a negative dimension other than `Leaf::kShared`
  BatchDim(std::initializer_list<ByArgument::value_type> dims)
      : BatchDim(std::variant<int64_t, ByArgument>(ByArgument(dims))) {}
  BatchDim(ByArgument dims) : BatchDim(std::variant<int64_t, ByArgument>(std::move(dims))) {}

  /// Null where it is by argument.
  const int64_t* for_all() const noexcept { return std::get_if<int64_t>(&dims_); }
  /// Null where it is one number.
  const ByArgument* by_argument() const noexcept { return std::get_if<ByArgument>(&dims_); }

 private:
  explicit BatchDim(std::variant<int64_t, ByArgument> dims);

  std::variant<int64_t, ByArgument> dims_;
};

}  // namespace infinitybatch
