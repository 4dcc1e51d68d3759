// Networks on vectors and images.
#include "exactness/family.hpp"

namespace infinitybatch::testing {
namespace {

namespace nn = torch::nn;

struct Mlp : FamilyModule {
  explicit Mlp(int64_t count) {
    first = register_module("first", nn::Linear(6, 9));
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({9})));
    out = register_module("out", nn::Linear(9, count));
  }
  at::Tensor features(const Batch& inputs) override {
    return out(norm(first(inputs.tensor())).relu());
  }
  nn::Linear first = nullptr, out = nullptr;
  nn::LayerNorm norm = nullptr;
};

struct Conv : FamilyModule {
  explicit Conv(int64_t count) {
    first = register_module("first", nn::Conv2d(nn::Conv2dOptions(2, 4, 3).padding(1)));
    second = register_module("second", nn::Conv2d(nn::Conv2dOptions(4, 5, 3).stride(2)));
    out = register_module("out", nn::Linear(5, count));
  }
  at::Tensor features(const Batch& inputs) override {
    const at::Tensor hidden = at::max_pool2d(first(inputs.tensor()).relu(), 2, 1);
    return out(second(hidden).tanh().mean({2, 3}));
  }
  nn::Conv2d first = nullptr, second = nullptr;
  nn::Linear out = nullptr;
};

struct Residual : FamilyModule {
  explicit Residual(int64_t count) {
    stem = register_module("stem", nn::Conv2d(nn::Conv2dOptions(1, 4, 3).padding(1)));
    for (int i = 0; i < 2; ++i) {
      convs.push_back(register_module("conv" + std::to_string(i),
                                      nn::Conv2d(nn::Conv2dOptions(4, 4, 3).padding(1))));
      norms.push_back(
          register_module("norm" + std::to_string(i), nn::GroupNorm(nn::GroupNormOptions(2, 4))));
    }
    out = register_module("out", nn::Linear(4, count));
  }
  at::Tensor features(const Batch& inputs) override {
    at::Tensor hidden = stem(inputs.tensor());
    for (size_t i = 0; i < convs.size(); ++i)
      hidden = hidden + at::gelu(norms[i](convs[i](hidden)));
    return out(at::adaptive_avg_pool2d(hidden, {1, 1}).flatten(1));
  }
  nn::Conv2d stem = nullptr;
  std::vector<nn::Conv2d> convs;
  std::vector<nn::GroupNorm> norms;
  nn::Linear out = nullptr;
};

struct UNet : FamilyModule {
  explicit UNet(int64_t count) {
    down = register_module("down", nn::Conv2d(nn::Conv2dOptions(1, 3, 3).padding(1)));
    bottom = register_module("bottom", nn::Conv2d(nn::Conv2dOptions(3, 4, 3).padding(1)));
    up = register_module("up", nn::ConvTranspose2d(nn::ConvTranspose2dOptions(4, 3, 2).stride(2)));
    join = register_module("join", nn::Conv2d(nn::Conv2dOptions(6, 1, 1)));
    out = register_module("out", nn::Linear(16, count));
  }
  at::Tensor features(const Batch& inputs) override {
    const at::Tensor left = down(inputs.tensor()).relu();
    const at::Tensor right = up(bottom(at::avg_pool2d(left, 2)).relu());
    return out(join(at::cat({left, right}, 1)).flatten(1));
  }
  nn::Conv2d down = nullptr, bottom = nullptr, join = nullptr;
  nn::ConvTranspose2d up = nullptr;
  nn::Linear out = nullptr;
};

struct DepthwiseConv : FamilyModule {
  explicit DepthwiseConv(int64_t count) {
    depth = register_module("depth", nn::Conv2d(nn::Conv2dOptions(4, 8, 3).groups(4).padding(1)));
    point = register_module("point", nn::Conv2d(nn::Conv2dOptions(8, 3, 1).bias(false)));
    out = register_module("out", nn::Linear(3, count));
  }
  at::Tensor features(const Batch& inputs) override {
    const at::Tensor images = inputs.tensor().contiguous(at::MemoryFormat::ChannelsLast);
    return out(point(at::silu(depth(images))).amax({2, 3}));
  }
  nn::Conv2d depth = nullptr, point = nullptr;
  nn::Linear out = nullptr;
};

/// In eval mode BatchNorm is an affine map of each sample. Its bias follows a convolution's.
struct BatchNormEval : FamilyModule {
  explicit BatchNormEval(int64_t count) {
    conv = register_module("conv", nn::Conv2d(nn::Conv2dOptions(2, 4, 3)));
    norm = register_module("norm", nn::BatchNorm2d(4));
    out = register_module("out", nn::Linear(4, count));
    at::NoGradGuard no_grad;
    norm->running_mean.uniform_(-1, 1);
    norm->running_var.uniform_(0.5, 2);
    eval();
  }
  at::Tensor features(const Batch& inputs) override {
    return out(norm(conv(inputs.tensor())).relu().mean({2, 3}));
  }
  nn::Conv2d conv = nullptr;
  nn::BatchNorm2d norm = nullptr;
  nn::Linear out = nullptr;
};

/// Computed by batch_norm in training mode, yet each sample for itself: must not be refused. The
/// convolution's bias has a true gradient of 0.
struct InstanceNorm : FamilyModule {
  explicit InstanceNorm(int64_t count) {
    conv = register_module("conv", nn::Conv2d(nn::Conv2dOptions(2, 4, 3)));
    norm = register_module("norm", nn::InstanceNorm2d(nn::InstanceNorm2dOptions(4).affine(true)));
    out = register_module("out", nn::Linear(4, count));
  }
  at::Tensor features(const Batch& inputs) override {
    return out(norm(conv(inputs.tensor())).relu().mean({2, 3}));
  }
  nn::Conv2d conv = nullptr;
  nn::InstanceNorm2d norm = nullptr;
  nn::Linear out = nullptr;
};

Family autocast_conv() {
  Family conv = family<Conv>("autocast_bf16_conv", normal_inputs({2, 7, 7}));
  conv.autocast = true;
  return conv;
}

}  // namespace

std::vector<Family> vision_families() {
  return {
      family<Mlp>("mlp", normal_inputs({6})),
      family<Conv>("conv", normal_inputs({2, 7, 7})),
      family<Residual>("residual_group_norm", normal_inputs({1, 5, 5})),
      family<UNet>("unet", normal_inputs({1, 4, 4})),
      family<DepthwiseConv>("depthwise_conv", normal_inputs({4, 5, 5})),
      family<BatchNormEval>("batch_norm_eval", normal_inputs({2, 5, 5})),
      family<InstanceNorm>("instance_norm", normal_inputs({2, 5, 5})),
      autocast_conv(),
  };
}

}  // namespace infinitybatch::testing
