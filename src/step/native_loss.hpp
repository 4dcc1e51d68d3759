#pragma once

#include "execute/problem.hpp"

#include <infinitybatch/step/virtual_batch.hpp>

#include <optional>

namespace infinitybatch {

/// The loss of `rows` samples in one piece, divided and penalised as native code would.
/// \param given the loss as native code computes it; nothing: `loss` itself
at::Tensor native_loss(const Loss& loss, const std::optional<CoupledLoss>& given, at::Device device,
                       int64_t rows, const Batch& outputs, const Batch& targets);

}  // namespace infinitybatch
