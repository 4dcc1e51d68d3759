#pragma once

#include "core/row_range.hpp"
#include "execute/setup.hpp"

#include <infinitybatch/core/batch.hpp>
#include <infinitybatch/core/errors.hpp>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>

namespace infinitybatch {

class WholeOutputs;

/// What a second forward with other outputs is told by. \param whose the gradient would not be
Unsupported forward_differs(const std::string& whose);

/// Whether second forwards give, bit for bit, the outputs that the loss belongs to. Compared on the
/// device without waiting for it: the result of all is asked for once.
class OutputComparison {
 public:
  /// \param whole the outputs of all, of a loss that is computed on them; null otherwise
  OutputComparison(const Setup& setup, WholeOutputs* whole)
      : problem_(setup.problem), strategy_(setup.strategy), whole_(whole) {}

  /// What a recording gave for these rows, where no loss of all keeps it.
  void expect(Rows rows, Batch outputs) {
    expected_.insert_or_assign(rows.begin, std::move(outputs));
  }
  /// What a second forward gave for them.
  void compare(Rows rows, const Batch& outputs);
  /// Waits for the device.
  /// \param replayed a tape that is not cut was played
  /// \throws tape::Mismatch where such a tape gave other outputs: user code can run instead
  /// \throws Unsupported where nothing else can
  void check(bool replayed) const;

 private:
  const Problem& problem_;
  const Strategy& strategy_;
  WholeOutputs* whole_;
  std::map<int64_t, Batch> expected_;  // by first row
  at::Tensor differs_;                 // from these; undefined where none was compared
};

}  // namespace infinitybatch
