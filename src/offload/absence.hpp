#pragma once

#include <string>

namespace infinitybatch::offload {

/// What torch says where memory is read that is offloaded. Nobody of ours reads it then: user code
/// holds a tensor that shares memory with what backward needs, in a way that no op tells.
inline constexpr const char* kAbsent =
    "infinitybatch: this tensor shares memory with activations that are offloaded until backward "
    "(x.data, or a pointer into it); read it after backward, return it from forward, keep "
    "x.detach() instead, or give offload=\"never\"";

/// Whether an exception's text is that.
inline bool tells_of_absence(const std::string& text) {
  return text.find(kAbsent) != std::string::npos;
}

}  // namespace infinitybatch::offload
