#include "interrupt.hpp"
#include "models/network.hpp"

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

namespace infinitybatch::app {
namespace {

/// `depth` hidden layers of `width` units with ReLU between.
class Mlp final : public Network {
 public:
  Mlp(int64_t features, int64_t width, int64_t depth, int64_t classes) {
    for (int64_t layer = 0; layer < depth; ++layer) {
      check_interrupt();
      layers_->push_back(torch::nn::Linear(layer == 0 ? features : width, width));
    }
    layers_->push_back(torch::nn::Linear(width, classes));
    register_module("layers", layers_);
  }

  at::Tensor forward(const at::Tensor& inputs) override {
    at::Tensor values = inputs.flatten(1);
    for (size_t layer = 0; layer + 1 < layers_->size(); ++layer) {
      values = layers_[layer]->as<torch::nn::Linear>()->forward(values).relu();
    }
    return layers_[layers_->size() - 1]->as<torch::nn::Linear>()->forward(values);
  }

 private:
  torch::nn::ModuleList layers_;
};

}  // namespace

std::shared_ptr<Network> make_mlp(int64_t features, int64_t width, int64_t depth, int64_t classes) {
  return std::make_shared<Mlp>(features, width, depth, classes);
}

}  // namespace infinitybatch::app
