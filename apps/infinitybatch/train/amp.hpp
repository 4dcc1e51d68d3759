#pragma once

#include "models/network.hpp"

#include <infinitybatch/core/model.hpp>

#include <memory>

namespace infinitybatch::app {

/// A network's scores, in float32; with `amp` computed under torch's autocast to bfloat16, which
/// needs no scaler of gradients.
at::Tensor scores_of(Network& network, const at::Tensor& inputs, bool amp);

/// The network as the library's step takes it.
Model model_of(const std::shared_ptr<Network>& network, bool amp);

}  // namespace infinitybatch::app
