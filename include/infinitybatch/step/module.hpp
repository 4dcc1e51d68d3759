#pragma once

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/core/model.hpp>

#include <c10/util/hash.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>

namespace infinitybatch {
namespace detail {

inline Batch to_batch(at::Tensor tensor) {
  return Batch(std::move(tensor));
}
inline Batch to_batch(Batch batch) {
  return batch;
}
inline Batch to_batch(std::vector<at::Tensor> tensors) {
  return Batch::list({tensors.begin(), tensors.end()});
}
template <typename... T>
Batch to_batch(std::tuple<T...> values) {
  return std::apply([](auto&... value) { return Batch::tuple({to_batch(std::move(value))...}); },
                    values);
}

/// The model's arguments: a tensor is one, a tuple or list one each.
inline std::vector<at::Tensor> arguments(const Batch& inputs) {
  if (inputs.is_tensor()) return {inputs.tensor()};
  const Structure& structure = *inputs.structure();
  if (structure.kind() == Structure::Kind::tuple || structure.kind() == Structure::Kind::list) {
    std::vector<at::Tensor> tensors;
    for (size_t i = 0; i < inputs.size(); ++i) tensors.push_back(inputs[i].tensor());
    return tensors;
  }
  throw InvalidType("a dict of inputs needs a module whose forward takes a const Batch&");
}

/// A forward of its own on batches. A template (Sequential's) would claim to take anything.
template <typename M>
concept TakesBatch = requires { decltype(&M::forward){nullptr}; } &&
                     (requires { static_cast<Batch (M::*)(const Batch&)>(&M::forward); } ||
                      requires { static_cast<Batch (M::*)(const Batch&) const>(&M::forward); });

template <typename M>
Batch call_forward(M& module, const Batch& inputs) {
  if constexpr (TakesBatch<M>) {
    return module.forward(inputs);
  } else {
    const std::vector<at::Tensor> a = arguments(inputs);
    const auto call = [&]<size_t... I>(std::index_sequence<I...>) -> std::optional<Batch> {
      if constexpr (requires { to_batch(module.forward(((void)I, a[0])...)); }) {
        if (a.size() == sizeof...(I)) return to_batch(module.forward(a[I]...));
      }
      return std::nullopt;
    };
    if (auto one = call(std::make_index_sequence<1>())) return *one;
    if (auto two = call(std::make_index_sequence<2>())) return *two;
    if (auto three = call(std::make_index_sequence<3>())) return *three;
    if (auto four = call(std::make_index_sequence<4>())) return *four;
    throw InvalidType("the module's forward does not take " + std::to_string(a.size()) +
                      " tensors; pass inputs as its forward takes them, or give it a forward that "
                      "takes a const Batch&");
  }
}

/// Everything but `forward`. `Root` keeps the module alive.
template <typename Root>
Model describe_module(Root root) {
  Model model;
  model.parameters = [root] {
    std::vector<NamedParameter> parameters;
    for (const auto& item : root->named_parameters()) {
      parameters.push_back({item.key(), item.value()});
    }
    return parameters;
  };
  model.buffers = [root] {
    std::vector<BufferSlot> slots;
    for (const auto& item : root->named_buffers()) {
      // C++ modules keep a second handle to each buffer in a member: values change in place only.
      at::Tensor tensor = item.value();
      slots.push_back({item.key(), [tensor] { return tensor; },
                       [tensor](const at::Tensor& value) { at::Tensor(tensor).copy_(value); }});
    }
    return slots;
  };
  model.is_training = [root] { return root->is_training(); };
  model.configuration = [root] {
    uint64_t number = root->is_training() ? 1 : 0;
    for (const auto& module : root->modules(/*include_self=*/false)) {
      number = c10::hash_combine(number, reinterpret_cast<uintptr_t>(module.get()));
      number = c10::hash_combine(number, module->is_training() ? 1 : 0);
    }
    return number;
  };
  return model;
}

}  // namespace detail

/// Shared pointers to modules whose forward takes up to four tensors, or a `const Batch&`.
template <std::derived_from<torch::nn::Module> M>
struct ModelOf<std::shared_ptr<M>> {
  static Model make(const std::shared_ptr<M>& module) {
    Model model = detail::describe_module(module);
    model.forward = [module](const Batch& inputs) { return detail::call_forward(*module, inputs); };
    return model;
  }
};

/// Module holders as TORCH_MODULE makes them: Linear, Sequential, your own.
template <typename Holder>
  requires requires(const Holder& holder) {
    typename Holder::ContainedType;
    { holder.ptr() } -> std::convertible_to<std::shared_ptr<torch::nn::Module>>;
  }
struct ModelOf<Holder> {
  static Model make(const Holder& holder) {
    return ModelOf<std::shared_ptr<typename Holder::ContainedType>>::make(holder.ptr());
  }
};

template <>
struct ModelOf<torch::nn::AnyModule> {
  static Model make(const torch::nn::AnyModule& any) {
    Model model = detail::describe_module(any.ptr());
    auto shared = std::make_shared<torch::nn::AnyModule>(any);
    model.forward = [shared](const Batch& inputs) {
      return Batch(shared->forward<at::Tensor>(inputs.tensor()));
    };
    return model;
  }
};

/// A model that is any callable with its parameters.
/// \param forward    runs one micro-batch
/// \param parameters the leaves whose gradients are wanted
inline Model make_model(std::function<Batch(const Batch&)> forward,
                        std::vector<at::Tensor> parameters) {
  Model model;
  model.forward = std::move(forward);
  model.parameters = [parameters = std::move(parameters)] {
    std::vector<NamedParameter> named;
    for (size_t i = 0; i < parameters.size(); ++i) {
      named.push_back({"parameter " + std::to_string(i), parameters[i]});
    }
    return named;
  };
  model.buffers = [] { return std::vector<BufferSlot>(); };
  model.is_training = [] { return true; };
  return model;
}

/// A model of anything that has a ModelOf.
template <typename T>
Model make_model(const T& module) {
  return Model(module);
}

}  // namespace infinitybatch
