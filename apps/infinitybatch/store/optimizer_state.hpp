#pragma once

#include "store/safetensors.hpp"

namespace torch::optim {
class Optimizer;
}  // namespace torch::optim

namespace infinitybatch::app {

/// The state of one of `make_optimizer`'s, as "optimizer/<number of the parameter>/<name>".
NamedTensors optimizer_state(torch::optim::Optimizer& optimizer);

/// \throws DataError where a tensor does not suit its parameter
void load_optimizer_state(torch::optim::Optimizer& optimizer, const StoredTensors& stored);

}  // namespace infinitybatch::app
