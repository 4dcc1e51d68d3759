#include "interrupt.hpp"
#include "models/network.hpp"

#include <ATen/Functions.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

namespace infinitybatch::app {
namespace {

constexpr int64_t kChannelsPerGroup = 8;
constexpr int64_t kLastPlaces = 2;  ///< the last feature map is averaged to 2 by 2 places

torch::nn::Conv2d convolution(int64_t from, int64_t to, int64_t kernel, int64_t stride) {
  return torch::nn::Conv2d(
      torch::nn::Conv2dOptions(from, to, kernel).stride(stride).padding(kernel / 2).bias(false));
}

torch::nn::AnyModule normalization(Normalization kind, int64_t channels) {
  if (kind == Normalization::group) {
    return torch::nn::AnyModule(
        torch::nn::GroupNorm(torch::nn::GroupNormOptions(channels / kChannelsPerGroup, channels)));
  }
  return torch::nn::AnyModule(torch::nn::BatchNorm2d(channels));
}

/// A convolution without bias and the normalisation behind it.
class NormalizedImpl : public torch::nn::Module {
 public:
  NormalizedImpl(Normalization kind, int64_t from, int64_t to, int64_t kernel, int64_t stride)
      : convolution_(convolution(from, to, kernel, stride)), norm_(normalization(kind, to)) {
    register_module("convolution", convolution_);
    register_module("norm", norm_.ptr());
  }

  at::Tensor forward(const at::Tensor& inputs) {
    return norm_.forward(convolution_->forward(inputs));
  }

 private:
  torch::nn::Conv2d convolution_;
  torch::nn::AnyModule norm_;
};
TORCH_MODULE(Normalized);

/// Two convolutions beside a shortcut, which has a convolution of its own where the shape changes.
class BlockImpl : public torch::nn::Module {
 public:
  BlockImpl(Normalization kind, int64_t from, int64_t to, int64_t stride)
      : first_(kind, from, to, 3, stride), second_(kind, to, to, 3, 1) {
    register_module("first", first_);
    register_module("second", second_);
    if (from != to || stride != 1) {
      shortcut_ = register_module("shortcut", Normalized(kind, from, to, 1, stride));
    }
  }

  at::Tensor forward(const at::Tensor& inputs) {
    const at::Tensor shortcut = shortcut_ ? shortcut_->forward(inputs) : inputs;
    return second_->forward(first_->forward(inputs).relu()).add(shortcut).relu();
  }

 private:
  Normalized first_;
  Normalized second_;
  Normalized shortcut_ = nullptr;
};
TORCH_MODULE(Block);

/// A stem, two stages of `depth` blocks (the second with twice the channels on half the image) and
/// a linear layer on the averaged features.
class ResNet final : public Network {
 public:
  ResNet(Normalization kind, int64_t channels, int64_t width, int64_t depth, int64_t classes)
      : stem_(kind, channels, width, 3, 1),
        classifier_(2 * width * kLastPlaces * kLastPlaces, classes) {
    for (int64_t stage = 0; stage < 2; ++stage) {
      for (int64_t block = 0; block < depth; ++block) {
        check_interrupt();
        const int64_t to = width * (stage + 1);
        const bool halves = stage == 1 && block == 0;
        blocks_->push_back(Block(kind, halves ? width : to, to, halves ? 2 : 1));
      }
    }
    register_module("stem", stem_);
    register_module("blocks", blocks_);
    register_module("classifier", classifier_);
  }

  at::Tensor forward(const at::Tensor& inputs) override {
    at::Tensor values = stem_->forward(inputs).relu();
    for (const auto& block : *blocks_) {
      values = block->as<Block>()->forward(values);
    }
    values = at::adaptive_avg_pool2d(values, {kLastPlaces, kLastPlaces});
    return classifier_->forward(values.flatten(1));
  }

 private:
  Normalized stem_;
  torch::nn::ModuleList blocks_;
  torch::nn::Linear classifier_;
};

}  // namespace

std::shared_ptr<Network> make_resnet(Normalization kind, int64_t channels, int64_t width,
                                     int64_t depth, int64_t classes) {
  return std::make_shared<ResNet>(kind, channels, width, depth, classes);
}

}  // namespace infinitybatch::app
