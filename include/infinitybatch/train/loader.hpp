#pragma once

#include <infinitybatch/core/batch_source.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

namespace infinitybatch {

/// What one step trains on: inputs and targets of the same samples.
struct LogicalBatch {
  BatchSource inputs;
  BatchSource targets;
  /// What a binding's own GradientStep reads in place of the two.
  std::shared_ptr<void> origin = {};

  LogicalBatch() = default;
  LogicalBatch(BatchSource inputs, BatchSource targets)
      : inputs(std::move(inputs)), targets(std::move(targets)) {}
  /// \throws BatchError as `BatchSource::from`
  LogicalBatch(const Batch& inputs, const Batch& targets);
};

/// Where a Trainer's logical batches come from.
class Loader {
 public:
  virtual ~Loader() = default;
  /// Begins an epoch's batches, or goes on in the middle of them after a failure.
  /// \param epoch counted from 0; the same number gives the same batches
  /// \param skip  batches of it that are done already
  virtual void begin(int64_t epoch, int64_t skip) = 0;
  /// Nothing where the epoch has no further batch.
  virtual std::optional<LogicalBatch> next() = 0;
};

namespace loaders {

/// Batches that a function makes by their number.
/// \param count batches in an epoch
std::shared_ptr<Loader> indexed(int64_t count,
                                std::function<LogicalBatch(int64_t epoch, int64_t batch)> make);

/// Batches that a function makes one after the other.
/// \param begin called for each epoch; gives the function that makes the next batch, or nothing at
///              the epoch's end
std::shared_ptr<Loader> generated(
    std::function<std::function<std::optional<LogicalBatch>()>(int64_t epoch)> begin);

namespace detail {

/// As `generated`; an epoch that is begun again before its end is begun with the default random
/// numbers of its beginning, which samplers of torch::data draw orders from.
std::shared_ptr<Loader> repeatable(
    std::function<std::function<std::optional<LogicalBatch>()>(int64_t epoch)> begin);

template <typename Item>
LogicalBatch batch_of(const Item& item) {
  if constexpr (requires { item.data, item.target; }) {
    return LogicalBatch(Batch(item.data), Batch(item.target));  // torch::data::Example
  } else {
    const auto& [inputs, targets] = item;
    return LogicalBatch(Batch(inputs), Batch(targets));
  }
}

}  // namespace detail

/// Batches of anything that `begin()` and `end()` go through: a torch::data loader whose dataset is
/// stacked, a vector of pairs, a view. It must outlive the loader, and can be begun once an epoch.
template <typename Range>
std::shared_ptr<Loader> over(Range& range) {
  return detail::repeatable([&range](int64_t) -> std::function<std::optional<LogicalBatch>()> {
    return [&range, at = std::make_shared<decltype(range.begin())>(range.begin()),
            first = true]() mutable -> std::optional<LogicalBatch> {
      // Advanced when the next one is wanted: loaders of torch read ahead at once.
      if (!first && *at != range.end()) ++*at;
      first = false;
      if (*at == range.end()) return std::nullopt;
      return detail::batch_of(**at);
    };
  });
}

}  // namespace loaders
}  // namespace infinitybatch
