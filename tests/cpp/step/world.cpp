#include "step/world.hpp"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <cstdlib>
#include <random>

namespace infinitybatch::testing {

namespace nn = torch::nn;

thread_local Tripwires* Tripwires::innermost = nullptr;

void Tripwires::pass() {
  if (innermost != nullptr && ++innermost->seen_ == innermost->fatal_) throw Tripped();
}

namespace {

struct Wire : torch::autograd::Function<Wire> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    Tripwires::pass();
    return x.view_as(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    Tripwires::pass();
    return gradients;
  }
};

struct PostHook : torch::autograd::FunctionPostHook {
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    Tripwires::pass();
    return outputs;
  }
};

constexpr double kScale = 3.0;
constexpr double kDecay = 0.01;

}  // namespace

at::Tensor tripwire(const at::Tensor& x) {
  return Wire::apply(x);
}

/// Layers with a tripwire behind each; a vector that every forward refines alike (as spectral_norm
/// does) and a counter.
struct World::Net : nn::Module {
  std::vector<std::function<at::Tensor(const at::Tensor&)>> layers;
  at::Tensor weight, vector, steps;
  torch::autograd::Variable hooked;
  decltype(torch::autograd::Edge::function) accumulator;  // kept alive, and with it its post hook

  template <typename Holder>
  Holder layer(const std::string& name, Holder holder) {
    register_module(name, holder);
    layers.push_back([holder](const at::Tensor& x) mutable { return holder(x); });
    return holder;
  }
  void function(std::function<at::Tensor(const at::Tensor&)> call) {
    layers.push_back(std::move(call));
  }
  void finish(const at::Tensor& matrix, Randomness randomness) {
    weight = matrix;
    vector = register_buffer("vector", at::ones({matrix.size(0)}, at::kDouble));
    steps = register_buffer("steps", at::zeros({}, at::kLong));
    function([randomness](const at::Tensor& x) {
      return randomness == Randomness::dropout ? at::dropout(x, 0.3, true)
                                               : x + 0 * at::rand({x.size(0), 5}).sum();
    });
  }
  Batch forward(const Batch& inputs) {
    at::Tensor x = inputs.tensor();
    for (const auto& call : layers) x = tripwire(call(x));
    {
      const at::NoGradGuard no_grad;
      const at::Tensor flat = weight.flatten(1);
      const at::Tensor next = at::mv(flat, at::mv(flat.t(), vector));
      vector.copy_(next / next.norm());
      steps.add_(1);
    }
    return x / vector.detach().abs().sum();
  }
};

const std::vector<std::string>& World::kinds() {
  static const std::vector<std::string> all{"mlp", "conv", "words"};
  return all;
}

World::World(const std::string& kind, Randomness randomness) : net_(std::make_shared<Net>()) {
  torch::manual_seed(5);
  Net& net = *net_;
  if (kind == "mlp") {
    const auto first = net.layer("first", nn::Linear(6, 8));
    net.function([](const at::Tensor& x) { return x.tanh(); });
    net.layer("norm", nn::LayerNorm(nn::LayerNormOptions({8})));
    net.layer("last", nn::Linear(8, 4));
    net.to(at::kDouble);
    net.finish(first->weight, randomness);
    inputs_ = at::randn({kSamples, 6}, at::kDouble);
    // Hooks, and gradients that are there already, on some.
    net.hooked = first->weight;
    net.hooked.register_hook([](const at::Tensor& gradient) {
      Tripwires::pass();
      return gradient * 1.0;
    });
    net.accumulator = torch::autograd::impl::grad_accumulator(first->bias);
    net.accumulator->add_post_hook(std::make_unique<PostHook>());
    first->weight.mutable_grad() = at::randn_like(first->weight).detach();
    net.named_parameters()["last.bias"].mutable_grad() = at::randn({4}, at::kDouble);
  } else if (kind == "conv") {
    const auto first = net.layer("first", nn::Conv2d(nn::Conv2dOptions(2, 4, 3).padding(1)));
    net.layer("norm", nn::GroupNorm(nn::GroupNormOptions(2, 4)));
    net.function([](const at::Tensor& x) { return x.relu(); });
    net.layer("second", nn::Conv2d(nn::Conv2dOptions(4, 4, 3)));
    net.function([](const at::Tensor& x) { return x.mean({2, 3}); });
    net.to(at::kDouble);
    net.finish(first->weight, randomness);
    inputs_ = at::randn({kSamples, 2, 5, 5}, at::kDouble);
  } else {
    // A sparse gradient, a recurrent layer, a weight used twice, gradients there already on all.
    const auto words = nn::Embedding(nn::EmbeddingOptions(7, 4).sparse(true));
    net.layer("words", words);
    auto gru = nn::GRU(nn::GRUOptions(4, 4).batch_first(true));
    net.register_module("gru", gru);
    net.function([gru](const at::Tensor& x) mutable { return std::get<0>(gru(x)).select(1, -1); });
    const auto tied = net.layer("tied", nn::Linear(4, 4));
    net.function([](const at::Tensor& x) { return x.tanh(); });
    net.layer("again", tied);
    net.to(at::kDouble);
    net.finish(tied->weight, randomness);
    inputs_ = at::randint(7, {kSamples, 3}, at::kLong);
    for (at::Tensor& parameter : net.parameters()) {
      parameter.mutable_grad() = parameter.is_same(words->weight)
                                     ? at::ones({7, 4}, at::kDouble).to_sparse(1)
                                     : at::randn_like(parameter).detach();
    }
  }
  temperature_ = at::full({}, 1.3, at::kDouble).requires_grad_();
  targets_ = at::randn({kSamples, 4}, at::kDouble);
}

World::~World() = default;

Model World::model() const {
  return Model(net_);
}

SeparableLoss World::loss() const {
  return losses::separable(
             [temperature = temperature_](const Batch& outputs, const Batch& targets) {
               Tripwires::pass();
               const at::Tensor difference =
                   tripwire(outputs.tensor()) * temperature - targets.tensor();
               return difference.square().sum();
             },
             [](const Batch&, int64_t samples) -> DenominatorPart {
               Tripwires::pass();
               return at::full({}, 4.0 * static_cast<double>(samples), at::kDouble);
             })
      .with_penalty([weight = net_->weight] {
        Tripwires::pass();
        return tripwire(weight).square().sum() * kDecay;
      });
}

Options World::options() const {
  Options options;
  options.on_micro_batch = [](const MicroBatch&) { Tripwires::pass(); };
  options.interrupt = [] { Tripwires::pass(); };
  options.loss_scale = [] {
    Tripwires::pass();
    return at::full({}, kScale, at::kDouble);
  };
  options.keep_outputs = true;
  return options;
}

BatchSource World::inputs() const {
  return {kSamples,
          [inputs = inputs_](int64_t begin, int64_t end) {
            Tripwires::pass();
            return rows(inputs, begin, end);
          },
          "world"};
}

BatchSource World::targets() const {
  return {kSamples,
          [targets = targets_](int64_t begin, int64_t end) {
            Tripwires::pass();
            return rows(targets, begin, end);
          },
          "world"};
}

at::Tensor World::native() {
  const Batch outputs = net_->forward(inputs_);
  const at::Tensor loss = at::mse_loss(outputs.tensor() * temperature_, targets_.tensor()) +
                          net_->weight.square().sum() * kDecay;
  (loss * kScale).backward();
  return loss.detach();
}

std::vector<NamedParameter> World::leaves() const {
  std::vector<NamedParameter> leaves;
  for (const auto& item : net_->named_parameters()) leaves.push_back({item.key(), item.value()});
  leaves.push_back({"the loss's temperature", temperature_});
  return leaves;
}

std::vector<at::Tensor> World::buffers() const {
  return net_->buffers();
}

namespace {

at::Tensor dense(const at::Tensor& tensor) {
  return (tensor.is_sparse() ? tensor.to_dense() : tensor).detach().contiguous();
}

at::Tensor copy_of(const at::Tensor& tensor) {
  return tensor.defined() ? dense(tensor).clone() : tensor;
}

at::Tensor random_state() {
  at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

}  // namespace

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.defined() != b.defined()) return false;
  if (!a.defined()) return true;
  const at::Tensor x = dense(a), y = dense(b);
  return x.sizes() == y.sizes() && x.scalar_type() == y.scalar_type() &&
         std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

Snapshot::Snapshot(const World& world) : world_(world) {
  for (const NamedParameter& leaf : world.leaves()) {
    parameters_.push_back({leaf.name, leaf.tensor, copy_of(leaf.tensor)});
    gradients_.push_back({leaf.name, leaf.tensor.grad(), copy_of(leaf.tensor.grad())});
  }
  for (const at::Tensor& buffer : world.buffers()) {
    buffers_.push_back({"a buffer", buffer, copy_of(buffer)});
  }
  random_ = random_state();
  live_ = memory::stats(at::kCPU).live;
}

void Snapshot::expect_unchanged() const {
  EXPECT_EQ(memory::stats(at::kCPU).live, live_) << "bytes are still held";
  const std::vector<NamedParameter> leaves = world_.leaves();
  for (size_t i = 0; i < leaves.size(); ++i) {
    EXPECT_TRUE(leaves[i].tensor.grad().is_same(gradients_[i].object))
        << ".grad of " << leaves[i].name << " is another object";
    EXPECT_TRUE(same_bits(leaves[i].tensor.grad(), gradients_[i].values))
        << ".grad of " << leaves[i].name;
    EXPECT_TRUE(same_bits(leaves[i].tensor, parameters_[i].values)) << leaves[i].name;
  }
  const std::vector<at::Tensor> buffers = world_.buffers();
  for (size_t i = 0; i < buffers.size(); ++i) {
    EXPECT_TRUE(buffers[i].is_same(buffers_[i].object));
    EXPECT_TRUE(same_bits(buffers[i], buffers_[i].values)) << "buffer " << i;
  }
  EXPECT_TRUE(same_bits(random_state(), random_)) << "random state";
}

Outcome::Outcome(const World& world, const at::Tensor& loss)
    : random(random_state()), loss(loss.clone()) {
  for (const NamedParameter& leaf : world.leaves()) {
    gradients.push_back({leaf.name, copy_of(leaf.tensor.grad())});
  }
  for (const at::Tensor& buffer : world.buffers()) buffers.push_back({"buffer", copy_of(buffer)});
}

void expect_same_bits(const Outcome& a, const Outcome& b) {
  EXPECT_TRUE(same_bits(a.loss, b.loss)) << "loss";
  EXPECT_TRUE(same_bits(a.random, b.random)) << "random state";
  for (size_t i = 0; i < a.gradients.size(); ++i) {
    EXPECT_TRUE(same_bits(a.gradients[i].tensor, b.gradients[i].tensor)) << a.gradients[i].name;
  }
  for (size_t i = 0; i < a.buffers.size(); ++i) {
    EXPECT_TRUE(same_bits(a.buffers[i].tensor, b.buffers[i].tensor)) << "buffer " << i;
  }
}

void expect_exact(const Outcome& ours, const Outcome& native) {
  const auto error = [](const at::Tensor& a, const at::Tensor& b) {
    if (a.defined() != b.defined()) return INFINITY;
    return a.defined() ? ((a - b).norm() / b.norm()).item<float>() : 0.F;
  };
  EXPECT_LE(error(ours.loss, native.loss), 1e-12F);
  EXPECT_TRUE(same_bits(ours.random, native.random)) << "random state";
  for (size_t i = 0; i < native.gradients.size(); ++i) {
    EXPECT_LE(error(ours.gradients[i].tensor, native.gradients[i].tensor), 1e-12F)
        << native.gradients[i].name;
  }
  for (size_t i = 0; i < native.buffers.size(); ++i) {
    EXPECT_TRUE(same_bits(ours.buffers[i].tensor, native.buffers[i].tensor)) << "buffer " << i;
  }
}

std::vector<int64_t> places(int64_t count) {
  constexpr int64_t kSample = 150, kEnds = 12;
  std::vector<int64_t> all(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) all[static_cast<size_t>(i)] = i + 1;
  if (count <= kSample || std::getenv("INFINITYBATCH_LONG_TESTS") != nullptr) return all;
  std::mt19937 random(17);
  std::shuffle(all.begin() + kEnds, all.end() - kEnds, random);
  all.erase(all.begin() + kSample - kEnds, all.end() - kEnds);
  std::sort(all.begin(), all.end());
  return all;
}

}  // namespace infinitybatch::testing
