#include "interrupt.hpp"
#include "models/network.hpp"

#include <ATen/Functions.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

namespace infinitybatch::app {
namespace {

constexpr int64_t kHeadSize = 16;

/// Causal attention and a feed-forward layer, each behind a LayerNorm (the pre-norm arrangement).
class LayerImpl : public torch::nn::Module {
 public:
  explicit LayerImpl(int64_t width)
      : attention_norm_(torch::nn::LayerNormOptions({width})),
        query_key_value_(width, 3 * width),
        attention_out_(width, width),
        forward_norm_(torch::nn::LayerNormOptions({width})),
        forward_in_(width, 4 * width),
        forward_out_(4 * width, width) {
    register_module("attention_norm", attention_norm_);
    register_module("query_key_value", query_key_value_);
    register_module("attention_out", attention_out_);
    register_module("forward_norm", forward_norm_);
    register_module("forward_in", forward_in_);
    register_module("forward_out", forward_out_);
  }

  /// \param inputs [n, context, width]
  at::Tensor forward(const at::Tensor& inputs) {
    const at::Tensor values = inputs + attend(attention_norm_->forward(inputs));
    const at::Tensor hidden = at::gelu(forward_in_->forward(forward_norm_->forward(values)));
    return values + forward_out_->forward(hidden);
  }

 private:
  at::Tensor attend(const at::Tensor& inputs) {
    const int64_t samples = inputs.size(0);
    const int64_t context = inputs.size(1);
    const int64_t width = inputs.size(2);
    const auto parts = query_key_value_->forward(inputs)
                           .view({samples, context, 3, width / kHeadSize, kHeadSize})
                           .permute({2, 0, 3, 1, 4})
                           .unbind(0);
    const at::Tensor mixed = at::scaled_dot_product_attention(
        parts[0], parts[1], parts[2], /*attn_mask=*/std::nullopt, /*dropout_p=*/0.0,
        /*is_causal=*/true);
    return attention_out_->forward(mixed.transpose(1, 2).reshape({samples, context, width}));
  }

  torch::nn::LayerNorm attention_norm_;
  torch::nn::Linear query_key_value_;
  torch::nn::Linear attention_out_;
  torch::nn::LayerNorm forward_norm_;
  torch::nn::Linear forward_in_;
  torch::nn::Linear forward_out_;
};
TORCH_MODULE(Layer);

/// A decoder that predicts each next symbol.
class Transformer final : public Network {
 public:
  Transformer(int64_t symbols, int64_t context, int64_t width, int64_t depth)
      : symbol_embedding_(symbols, width),
        position_embedding_(context, width),
        norm_(torch::nn::LayerNormOptions({width})),
        classifier_(width, symbols) {
    for (int64_t layer = 0; layer < depth; ++layer) {
      check_interrupt();
      layers_->push_back(Layer(width));
    }
    register_module("symbol_embedding", symbol_embedding_);
    register_module("position_embedding", position_embedding_);
    register_module("layers", layers_);
    register_module("norm", norm_);
    register_module("classifier", classifier_);
  }

  /// \param inputs int64 [n, context]; \return scores [n, symbols, context]
  at::Tensor forward(const at::Tensor& inputs) override {
    // Rows 0 to context of the table: every sample has the same positions.
    const at::Tensor positions = position_embedding_->weight.slice(0, 0, inputs.size(1));
    at::Tensor values = symbol_embedding_->forward(inputs) + positions;
    for (const auto& layer : *layers_) {
      values = layer->as<Layer>()->forward(values);
    }
    return classifier_->forward(norm_->forward(values)).transpose(1, 2);
  }

 private:
  torch::nn::Embedding symbol_embedding_;
  torch::nn::Embedding position_embedding_;
  torch::nn::ModuleList layers_;
  torch::nn::LayerNorm norm_;
  torch::nn::Linear classifier_;
};

}  // namespace

std::shared_ptr<Network> make_transformer(int64_t symbols, int64_t context, int64_t width,
                                          int64_t depth) {
  return std::make_shared<Transformer>(symbols, context, width, depth);
}

}  // namespace infinitybatch::app
