#include "train/amp.hpp"

#include <infinitybatch/step/module.hpp>

#include <ATen/autocast_mode.h>

namespace infinitybatch::app {
namespace {

/// torch.autocast, as long as it lives.
class Autocast {
 public:
  explicit Autocast(at::DeviceType device)
      : device_(device),
        enabled_(at::autocast::is_autocast_enabled(device)),
        type_(at::autocast::get_autocast_dtype(device)) {
    at::autocast::set_autocast_enabled(device, true);
    at::autocast::set_autocast_dtype(device, at::kBFloat16);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    // Weights that were cast belong to the graph of this forward.
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_dtype(device_, type_);
    at::autocast::set_autocast_enabled(device_, enabled_);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  at::DeviceType device_;
  bool enabled_;
  at::ScalarType type_;
};

}  // namespace

at::Tensor scores_of(Network& network, const at::Tensor& inputs, bool amp) {
  if (!amp) return network.forward(inputs);
  const Autocast autocast(inputs.device().type());
  return network.forward(inputs).to(at::kFloat);
}

Model model_of(const std::shared_ptr<Network>& network, bool amp) {
  Model model = make_model(network);
  if (amp) {
    model.forward = [network](const Batch& inputs) {
      return Batch(scores_of(*network, inputs.tensor(), /*amp=*/true));
    };
  }
  return model;
}

}  // namespace infinitybatch::app
