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

 private:
  std::map<const void*, at::Tensor> buffers_;  // their values, by tensor
};

}  // namespace infinitybatch
