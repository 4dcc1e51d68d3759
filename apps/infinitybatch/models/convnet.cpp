#include "interrupt.hpp"
#include "models/network.hpp"

#include <ATen/Functions.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

namespace infinitybatch::app {
namespace {

constexpr int64_t kPooled = 2;  ///< the last feature map is averaged to 2 by 2 places

/// `depth` convolutions of 3 by 3 with ReLU, halving the image after the second one; a linear layer
/// on the averaged features. No normalisation.
class ConvNet final : public Network {
 public:
  ConvNet(int64_t channels, int64_t width, int64_t depth, int64_t classes)
      : classifier_(width * kPooled * kPooled, classes) {
    for (int64_t layer = 0; layer < depth; ++layer) {
      check_interrupt();
      const auto options = torch::nn::Conv2dOptions(layer == 0 ? channels : width, width, 3)
                               .padding(1)
                               .stride(layer == 1 ? 2 : 1);
      convolutions_->push_back(torch::nn::Conv2d(options));
    }
    register_module("convolutions", convolutions_);
    register_module("classifier", classifier_);
  }

  at::Tensor forward(const at::Tensor& inputs) override {
    at::Tensor values = inputs;
    for (const auto& layer : *convolutions_) {
      values = layer->as<torch::nn::Conv2d>()->forward(values).relu();
    }
    values = at::adaptive_avg_pool2d(values, {kPooled, kPooled});
    return classifier_->forward(values.flatten(1));
  }

 private:
  torch::nn::ModuleList convolutions_;
  torch::nn::Linear classifier_;
};

}  // namespace

std::shared_ptr<Network> make_convnet(int64_t channels, int64_t width, int64_t depth,
                                      int64_t classes) {
  return std::make_shared<ConvNet>(channels, width, depth, classes);
}

}  // namespace infinitybatch::app
