#pragma once

#include "core/exception_text.hpp"
#include "core/foreign_exception.hpp"
#include "tape/recorder.hpp"

#include <infinitybatch/core/errors.hpp>

#include <exception>
#include <string>

namespace infinitybatch {

/// `forward` under a recorder that was lightened: its graph cannot run backward.
/// \throws Unsupported where forward itself asks for gradients
template <typename Forward>
auto run_lightly(tape::Recorder& recorder, Forward&& forward) {
  try {
    return recorder.run(forward);
  } catch (...) {
    const std::exception_ptr error = std::current_exception();
    const bool backward =
        first_line_of(error).find("backward through the graph a second time") != std::string::npos;
    if (!backward) {
      keep_foreign_exception(error);
      throw;
    }
  }
  throw Unsupported(
      "forward cannot be cut into segments: gradients are computed inside of it "
      "(torch.autograd.grad), through a graph that one sample has no room for; leave "
      "checkpoint_segments out, or give a larger memory_budget");
}

}  // namespace infinitybatch
