#pragma once

#include "tape/tape.hpp"

#include <ATen/core/Tensor.h>

#include <map>

namespace infinitybatch {

/// What micro-batches' recordings find in buffers and as numbers of the program: mostly the same
/// for all of them, so that one copy will do.
class FoundValues {
 public:
  /// \param first another micro-batch's recording, null where there is none
  void share(tape::Tape& tape, const tape::Tape* first);
  /// What an earlier recording found in this buffer; undefined where none did.
  at::Tensor in(const at::Tensor& buffer) const {
    const auto known = buffers_.find(buffer.unsafeGetTensorImpl());
    return known != buffers_.end() ? known->second : at::Tensor();
  }

 private:
  std::map<const void*, at::Tensor> buffers_;  // their values, by tensor
};

}  // namespace infinitybatch
