#pragma once

#include <infinitybatch/core/errors.hpp>

namespace infinitybatch::tape {

/// A replay gave other outputs than its recording. The step answers it by running the user's code
/// again instead; users never see it.
class Mismatch : public Error {
 public:
  using Error::Error;
};

}  // namespace infinitybatch::tape
