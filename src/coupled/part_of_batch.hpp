#pragma once

#include <cstdint>
#include <optional>

namespace infinitybatch::coupled {

/// While it lives, this thread runs a part of a logical batch through a model whose ops see all of
/// it. Layers that refuse to normalise a single sample, as `torch.nn.BatchNorm1d` does in Python,
/// would not refuse the batch: bindings ask here whether to answer for them. A function of
/// `across_batch` that is not content with so few rows is given more (see `run_provisionally`).
class PartOfBatch {
 public:
  struct Facts {
    int64_t rows = 0;           ///< at work
    int64_t total = 0;          ///< of the logical batch
    bool native_draws = false;  ///< random numbers have to be those of the whole batch
  };

  /// \param facts nothing: what is at work stands for itself
  explicit PartOfBatch(std::optional<Facts> facts);
  ~PartOfBatch();
  PartOfBatch(const PartOfBatch&) = delete;
  PartOfBatch& operator=(const PartOfBatch&) = delete;

  /// Nothing, too, where all of the batch is at work.
  static const std::optional<Facts>& at_work() noexcept;
  /// Whether the part is a single sample.
  static bool of_one() noexcept;

 private:
  std::optional<Facts> outer_;
};

}  // namespace infinitybatch::coupled
