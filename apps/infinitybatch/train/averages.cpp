#include "train/averages.hpp"

#include "errors.hpp"

#include <c10/core/GradMode.h>

#include <algorithm>

namespace infinitybatch::app {

Averages::Averages(std::shared_ptr<Network> network, double decay)
    : network_(std::move(network)), decay_(decay) {
  for (const at::Tensor& parameter : network_->parameters()) {
    averages_.push_back(parameter.detach().clone());
  }
}

void Averages::on_batch_end(const events::BatchEnd& /*event*/) {
  const at::NoGradGuard no_grad;
  const auto parameters = network_->parameters();
  for (size_t i = 0; i < averages_.size(); ++i) averages_[i].lerp_(parameters[i], 1 - decay_);
}

void Averages::swap() {
  const at::NoGradGuard no_grad;
  const auto parameters = network_->parameters();
  for (size_t i = 0; i < averages_.size(); ++i) {
    const at::Tensor own = parameters[i].detach().clone();
    parameters[i].copy_(averages_[i]);
    averages_[i].copy_(own);
  }
}

NamedTensors Averages::tensors() const {
  NamedTensors named;
  size_t i = 0;
  for (const auto& item : network_->named_parameters())
    named.emplace_back(item.key(), averages_[i++]);
  return named;
}

void Averages::restore(const NamedTensors& tensors) {
  for (const auto& [name, average] : this->tensors()) {
    const auto found = std::find_if(tensors.begin(), tensors.end(),
                                    [&](const auto& named) { return named.first == name; });
    if (found == tensors.end() || found->second.sizes() != average.sizes()) {
      throw DataError("the checkpoint has no average of " + name +
                      ", which --ema needs; train anew without --resume");
    }
    average.copy_(found->second);
  }
}

}  // namespace infinitybatch::app
