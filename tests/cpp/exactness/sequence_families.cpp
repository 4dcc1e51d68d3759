// Networks on sequences and words.
#include "exactness/family.hpp"

namespace infinitybatch::testing {
namespace {

namespace nn = torch::nn;

constexpr int64_t kWords = 11, kWidth = 8, kTime = 5;

struct TransformerEncoder : FamilyModule {
  explicit TransformerEncoder(int64_t count) {
    const auto layer = nn::TransformerEncoderLayer(
        nn::TransformerEncoderLayerOptions(kWidth, 2).dim_feedforward(12).dropout(0));
    encoder =
        register_module("encoder", nn::TransformerEncoder(nn::TransformerEncoderOptions(layer, 2)));
    out = register_module("out", nn::Linear(kWidth, count));
  }
  at::Tensor features(const Batch& inputs) override {
    return out(encoder(inputs.tensor().transpose(0, 1)).mean(0));
  }
  nn::TransformerEncoder encoder = nullptr;
  nn::Linear out = nullptr;
};

/// Causal attention; the words' embedding is the output layer's weight too.
struct TransformerDecoderTied : FamilyModule {
  explicit TransformerDecoderTied(int64_t count) {
    words = register_module("words", nn::Embedding(kWords, kWidth));
    places = register_parameter("places", at::randn({kTime, kWidth}).mul_(0.1));
    qkv = register_module("qkv", nn::Linear(kWidth, 3 * kWidth));
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    out = register_module("out", nn::Linear(nn::LinearOptions(kWords, count).bias(false)));
  }
  at::Tensor features(const Batch& inputs) override {
    const at::Tensor hidden = words(inputs.tensor()) + places;  // (n, T, W)
    std::vector<at::Tensor> heads;
    for (const at::Tensor& part : qkv(norm(hidden)).chunk(3, 2)) {
      heads.push_back(part.unflatten(2, {2, kWidth / 2}).transpose(1, 2));
    }
    const at::Tensor mixed = at::scaled_dot_product_attention(heads[0], heads[1], heads[2], {}, 0.0,
                                                              /*is_causal=*/true);
    const at::Tensor result = hidden + mixed.transpose(1, 2).flatten(2);
    return out(at::linear(result, words->weight).tanh().sum(1));
  }
  nn::Embedding words = nullptr;
  at::Tensor places;
  nn::Linear qkv = nullptr, out = nullptr;
  nn::LayerNorm norm = nullptr;
};

struct Attention : FamilyModule {
  explicit Attention(int64_t count) {
    before = register_module("before", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    attention = register_module("attention", nn::MultiheadAttention(kWidth, 4));
    after = register_module("after", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    out = register_module("out", nn::Linear(kWidth, count));
  }
  /// Inputs (n, T, W) and a mask (n, T) of places that don't count.
  at::Tensor features(const Batch& inputs) override {
    const at::Tensor hidden = inputs[0].tensor().transpose(0, 1);
    const at::Tensor normed = before(hidden);
    const at::Tensor mixed =
        std::get<0>(attention(normed, normed, normed, inputs[1].tensor(), false));
    return out(after(hidden + mixed).mean(0));
  }
  nn::LayerNorm before = nullptr, after = nullptr;
  nn::MultiheadAttention attention = nullptr;
  nn::Linear out = nullptr;
};

Batch masked_sequences(Draw& draw) {
  at::Tensor mask = draw.integers(0, 3, {kTime}).eq(0);
  mask.slice(1, 0, 1).fill_(false);  // something is left to attend to
  return Batch::list({draw.normal({kTime, kWidth}), mask});
}

struct Lstm : FamilyModule {
  explicit Lstm(int64_t count) {
    lstm = register_module(
        "lstm",
        nn::LSTM(nn::LSTMOptions(4, 5).num_layers(2).bidirectional(true).batch_first(true)));
    out = register_module("out", nn::Linear(10, count));
  }
  at::Tensor features(const Batch& inputs) override {
    return out(std::get<0>(lstm(inputs.tensor())).select(1, -1));
  }
  nn::LSTM lstm = nullptr;
  nn::Linear out = nullptr;
};

/// Inputs (T, n, W): the batch is dimension 1.
struct Gru : FamilyModule {
  explicit Gru(int64_t count) {
    gru = register_module("gru", nn::GRU(nn::GRUOptions(4, 6)));
    out = register_module("out", nn::Linear(6, count));
  }
  at::Tensor features(const Batch& inputs) override {
    return out(std::get<1>(gru(inputs.tensor())).squeeze(0));
  }
  nn::GRU gru = nullptr;
  nn::Linear out = nullptr;
};

struct ConvRnn : FamilyModule {
  explicit ConvRnn(int64_t count) {
    conv = register_module("conv", nn::Conv1d(nn::Conv1dOptions(3, 4, 3).dilation(2).padding(2)));
    rnn = register_module("rnn", nn::RNN(nn::RNNOptions(4, 5).batch_first(true)));
    out = register_module("out", nn::Linear(5, count));
  }
  at::Tensor features(const Batch& inputs) override {
    const at::Tensor hidden = conv(inputs.tensor()).relu().transpose(1, 2);
    return out(std::get<0>(rnn(hidden)).sum(1));
  }
  nn::Conv1d conv = nullptr;
  nn::RNN rnn = nullptr;
  nn::Linear out = nullptr;
};

struct EmbeddingBags : FamilyModule {
  explicit EmbeddingBags(int64_t count) {
    mean = register_module(
        "mean", nn::EmbeddingBag(nn::EmbeddingBagOptions(kWords, kWidth).mode(torch::kMean)));
    sum = register_module(
        "sum", nn::EmbeddingBag(nn::EmbeddingBagOptions(kWords, kWidth).mode(torch::kSum)));
    out = register_module("out", nn::Linear(kWidth, count));
  }
  at::Tensor features(const Batch& inputs) override {
    return out(mean(inputs[0].tensor()) *
               sum(inputs[0].tensor(), at::Tensor(), inputs[1].tensor()));
  }
  nn::EmbeddingBag mean = nullptr, sum = nullptr;
  nn::Linear out = nullptr;
};

Batch weighted_words(Draw& draw) {
  return Batch::tuple({draw.integers(0, kWords, {kTime}), draw.uniform({kTime}, 0.2, 1.5)});
}

struct SparseEmbedding : FamilyModule {
  explicit SparseEmbedding(int64_t count) {
    words =
        register_module("words", nn::Embedding(nn::EmbeddingOptions(kWords, kWidth).sparse(true)));
    bags = register_module(
        "bags",
        nn::EmbeddingBag(nn::EmbeddingBagOptions(kWords, kWidth).mode(torch::kSum).sparse(true)));
    out = register_module("out", nn::Linear(kWidth, count));
  }
  at::Tensor features(const Batch& inputs) override {
    return out(words(inputs.tensor()).tanh().sum(1) + bags(inputs.tensor()));
  }
  nn::Embedding words = nullptr;
  nn::EmbeddingBag bags = nullptr;
  nn::Linear out = nullptr;
};

Family autocast_encoder() {
  Family encoder =
      family<TransformerEncoder>("autocast_bf16_encoder", normal_inputs({kTime, kWidth}));
  encoder.autocast = true;
  return encoder;
}

}  // namespace

std::vector<Family> sequence_families() {
  return {
      family<TransformerEncoder>("transformer_encoder", normal_inputs({kTime, kWidth})),
      family<TransformerDecoderTied>("transformer_decoder_tied", word_inputs(kWords, {kTime})),
      family<Attention>("masked_attention", masked_sequences),
      family<Lstm>("lstm", normal_inputs({kTime, 4})),
      family<Gru>("gru_batch_dim_1",
                  [](Draw& draw) {
                    return Batch(draw.normal({kTime, 4}).transpose(0, 1)).with_batch_dim(1);
                  }),
      family<ConvRnn>("conv1d_rnn", normal_inputs({3, kTime})),
      family<EmbeddingBags>("embedding_bag", weighted_words),
      family<SparseEmbedding>("sparse_embedding", word_inputs(kWords, {kTime})),
      autocast_encoder(),
  };
}

}  // namespace infinitybatch::testing
