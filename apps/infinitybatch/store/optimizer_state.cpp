#include "store/optimizer_state.hpp"

#include "errors.hpp"

#include <ATen/Functions.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <memory>

namespace infinitybatch::app {
namespace {

namespace optim = torch::optim;

// Each kind of state by its fields: tensors, and counts of steps.
template <typename Visit>
void fields(optim::AdamParamState& state, Visit visit) {
  visit("step", state.step());
  visit("exp_avg", state.exp_avg());
  visit("exp_avg_sq", state.exp_avg_sq());
}
template <typename Visit>
void fields(optim::AdamWParamState& state, Visit visit) {
  visit("step", state.step());
  visit("exp_avg", state.exp_avg());
  visit("exp_avg_sq", state.exp_avg_sq());
}
template <typename Visit>
void fields(optim::SGDParamState& state, Visit visit) {
  visit("momentum_buffer", state.momentum_buffer());
}
template <typename Visit>
void fields(optim::RMSpropParamState& state, Visit visit) {
  visit("step", state.step());
  visit("square_avg", state.square_avg());
}
template <typename Visit>
void fields(optim::AdagradParamState& state, Visit visit) {
  visit("step", state.step());
  visit("sum", state.sum());
}

struct Writing {
  std::string prefix;
  NamedTensors& all;

  void operator()(const char* name, const at::Tensor& value) const {
    if (value.defined()) all.emplace_back(prefix + name, value);
  }
  void operator()(const char* name, int64_t value) const {
    all.emplace_back(prefix + name, at::scalar_tensor(value, at::kLong));
  }
};

struct Reading {
  std::string prefix;
  const StoredTensors& stored;
  const at::Tensor& parameter;

  const at::Tensor& find(const char* name, at::IntArrayRef sizes, at::ScalarType type) const {
    const auto found = stored.tensors.find(prefix + name);
    if (found == stored.tensors.end() || found->second.sizes() != sizes ||
        found->second.scalar_type() != type) {
      throw DataError(stored.path + ": its optimizer's state " + prefix + name +
                      " is missing or of another shape; the checkpoint is damaged");
    }
    return found->second;
  }
  void operator()(const char* name, at::Tensor& value) const {
    value = find(name, parameter.sizes(), parameter.scalar_type())
                .to(parameter.device(), parameter.scalar_type(), /*non_blocking=*/false,
                    /*copy=*/true);
  }
  void operator()(const char* name, int64_t& value) const {
    value = find(name, {}, at::kLong).item<int64_t>();
  }
};

/// Calls `use` with a null pointer of the optimizer's kind of state.
template <typename Use>
void with_kind(optim::Optimizer& optimizer, Use use) {
  if (dynamic_cast<optim::Adam*>(&optimizer) != nullptr) {
    use(static_cast<optim::AdamParamState*>(nullptr));
  } else if (dynamic_cast<optim::AdamW*>(&optimizer) != nullptr) {
    use(static_cast<optim::AdamWParamState*>(nullptr));
  } else if (dynamic_cast<optim::SGD*>(&optimizer) != nullptr) {
    use(static_cast<optim::SGDParamState*>(nullptr));
  } else if (dynamic_cast<optim::RMSprop*>(&optimizer) != nullptr) {
    use(static_cast<optim::RMSpropParamState*>(nullptr));
  } else {
    use(static_cast<optim::AdagradParamState*>(nullptr));
  }
}

template <typename Each>
void each_parameter(optim::Optimizer& optimizer, Each each) {
  size_t number = 0;
  for (auto& group : optimizer.param_groups()) {
    for (at::Tensor& parameter : group.params()) {
      each("optimizer/" + std::to_string(number++) + "/", parameter);
    }
  }
}

}  // namespace

NamedTensors optimizer_state(optim::Optimizer& optimizer) {
  NamedTensors all;
  with_kind(optimizer, [&](auto* kind) {
    using State = std::remove_pointer_t<decltype(kind)>;
    each_parameter(optimizer, [&](const std::string& prefix, const at::Tensor& parameter) {
      const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (found == optimizer.state().end()) return;
      fields(static_cast<State&>(*found->second), Writing{prefix, all});
    });
  });
  return all;
}

void load_optimizer_state(optim::Optimizer& optimizer, const StoredTensors& stored) {
  with_kind(optimizer, [&](auto* kind) {
    using State = std::remove_pointer_t<decltype(kind)>;
    each_parameter(optimizer, [&](const std::string& prefix, const at::Tensor& parameter) {
      // Before its first step an optimizer has no state of a parameter.
      const auto first = stored.tensors.lower_bound(prefix);
      if (first == stored.tensors.end() || first->first.rfind(prefix, 0) != 0) return;
      auto state = std::make_unique<State>();
      fields(*state, Reading{prefix, stored, parameter});
      optimizer.state()[parameter.unsafeGetTensorImpl()] = std::move(state);
    });
  });
}

}  // namespace infinitybatch::app
