#include <ATen/Functions.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include "models/network.hpp"

namespace infinitybatch::app {
namespace {

constexpr int64_t kChannelsPerGroup = 8;
constexpr int64_t kPooled = 2;  ///< the last feature map is averaged to 2 by 2 places

torch::nn::Conv2d convolution(int64_t from, int64_t to, int64_t kernel, int64_t stride) {
  return torch::nn::Conv2d(
      torch::nn::Conv2dOptions(from, to, kernel).stride(stride).padding(kernel / 2).bias(false));
}

torch::nn::GroupNorm group_norm(int64_t channels) {
  return torch::nn::GroupNorm(torch::nn::GroupNormOptions(channels / kChannelsPerGroup, channels));
}

/// Two convolutions beside a shortcut (He et al. 2015). GroupNorm (Wu and He 2018) instead of
/// BatchNorm, so that no sample's output depends on another's.
class BlockImpl : public torch::nn::Module {
 public:
  BlockImpl(int64_t from, int64_t to, int64_t stride)
      : first_(convolution(from, to, 3, stride)),
        first_norm_(group_norm(to)),
        second_(convolution(to, to, 3, 1)),
        second_norm_(group_norm(to)) {
    register_module("first", first_);
    register_module("first_norm", first_norm_);
    register_module("second", second_);
    register_module("second_norm", second_norm_);
    if (from != to || stride != 1) {
      shortcut_ = register_module("shortcut", convolution(from, to, 1, stride));
    }
  }

  at::Tensor forward(const at::Tensor& inputs) {
    const at::Tensor shortcut = shortcut_ ? shortcut_->forward(inputs) : inputs;
    const at::Tensor values = first_norm_->forward(first_->forward(inputs)).relu();
    return second_norm_->forward(second_->forward(values)).add(shortcut).relu();
  }

 private:
  torch::nn::Conv2d first_;
  torch::nn::GroupNorm first_norm_;
  torch::nn::Conv2d second_;
  torch::nn::GroupNorm second_norm_;
  torch::nn::Conv2d shortcut_ = nullptr;
};
TORCH_MODULE(Block);

/// A stem, two stages of `depth` blocks (the second with twice the channels on half the image) and
/// a linear layer on the averaged features.
class ResNet final : public Network {
 public:
  ResNet(int64_t channels, int64_t width, int64_t depth, int64_t classes)
      : stem_(convolution(channels, width, 3, 1)),
        stem_norm_(group_norm(width)),
        classifier_(2 * width * kPooled * kPooled, classes) {
    for (int64_t stage = 0; stage < 2; ++stage) {
      for (int64_t block = 0; block < depth; ++block) {
        const int64_t to = width * (stage + 1);
        const bool is_first = block == 0;
        blocks_->push_back(Block(is_first ? width : to, to, stage == 1 && is_first ? 2 : 1));
      }
    }
    register_module("stem", stem_);
    register_module("stem_norm", stem_norm_);
    register_module("blocks", blocks_);
    register_module("classifier", classifier_);
  }

  at::Tensor forward(const at::Tensor& inputs) override {
    at::Tensor values = stem_norm_->forward(stem_->forward(inputs)).relu();
    for (const auto& block : *blocks_) {
      values = block->as<Block>()->forward(values);
    }
    values = at::adaptive_avg_pool2d(values, {kPooled, kPooled});
    return classifier_->forward(values.flatten(1));
  }

 private:
  torch::nn::Conv2d stem_;
  torch::nn::GroupNorm stem_norm_;
  torch::nn::ModuleList blocks_;
  torch::nn::Linear classifier_;
};

}  // namespace

std::shared_ptr<Network> make_resnet(int64_t channels, int64_t width, int64_t depth,
                                     int64_t classes) {
  return std::make_shared<ResNet>(channels, width, depth, classes);
}

}  // namespace infinitybatch::app
