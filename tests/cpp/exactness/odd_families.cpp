// Models that do what naive accumulation, recording or hooking trips over.
#include "exactness/family.hpp"

#include <torch/csrc/autograd/engine.h>

namespace infinitybatch::testing {
namespace {

namespace nn = torch::nn;

/// Each sample goes to the expert that its gate prefers: which experts a micro-batch uses, and on
/// how many rows, depends on the data.
struct MixtureOfExperts : FamilyModule {
  explicit MixtureOfExperts(int64_t count) {
    gate = register_module("gate", nn::Linear(5, 4));
    for (int i = 0; i < 4; ++i) {
      experts.push_back(register_module("expert" + std::to_string(i), nn::Linear(5, 6)));
    }
    out = register_module("out", nn::Linear(6, count));
  }
  at::Tensor features(const Batch& inputs) override {
    const at::Tensor& x = inputs.tensor();
    const at::Tensor weight = gate(x).softmax(1);
    const auto [best, choice] = weight.max(1);
    at::Tensor hidden = at::zeros({x.size(0), 6}, x.options());
    for (int64_t i = 0; i < 4; ++i) {
      const at::Tensor rows = choice.eq(i).nonzero().squeeze(1);
      if (rows.numel() == 0) continue;
      const at::Tensor mixed = experts[static_cast<size_t>(i)](x.index_select(0, rows)).tanh() *
                               best.index_select(0, rows).unsqueeze(1);
      hidden = hidden.index_add(0, rows, mixed);
    }
    return out(hidden);
  }
  nn::Linear gate = nullptr, out = nullptr;
  std::vector<nn::Linear> experts;
};

struct InPlace : FamilyModule {
  explicit InPlace(int64_t count) {
    first = register_module("first", nn::Linear(6, 8));
    second = register_module("second", nn::Linear(8, 8));
    scale = register_parameter("scale", at::rand({8}) + 0.5);
    out = register_module("out", nn::Linear(8, count));
  }
  at::Tensor features(const Batch& inputs) override {
    at::Tensor hidden = first(inputs.tensor());
    hidden.clamp_(-1.5, 1.5).mul_(scale).add_(0.3);
    at::Tensor some = hidden.slice(1, 0, 4);
    at::silu_(some);
    hidden.select(1, 7).copy_(hidden.select(1, 0).clone());
    at::Tensor next = second(hidden);
    next.pow_(2).add_(hidden);
    next.masked_fill_(next.detach().gt(1.2), 0.1);
    at::Tensor canvas = at::zeros_like(next);
    canvas.narrow(1, 2, 6).add_(next.narrow(1, 0, 6));
    canvas.narrow(1, 0, 2).addcmul_(next.narrow(1, 6, 2), scale.slice(0, 0, 2));
    return out(canvas);
  }
  nn::Linear first = nullptr, second = nullptr, out = nullptr;
  at::Tensor scale;
};

struct Views : FamilyModule {
  explicit Views(int64_t count) {
    weight = register_parameter("weight", at::randn({6, 12}).mul_(0.4));
    out = register_module("out", nn::Linear(4, count));
  }
  at::Tensor features(const Batch& inputs) override {
    const std::vector<at::Tensor> parts = at::matmul(inputs.tensor(), weight).chunk(3, 1);
    const at::Tensor turned = parts[0].t().contiguous().t();
    const std::vector<at::Tensor> columns = parts[1].unbind(1);
    const at::Tensor stacked = at::stack({columns[3], columns[1], columns[2], columns[0]}, 1);
    const at::Tensor windows = parts[2].unfold(1, 2, 1).sum(2);  // (n, 3)
    const at::Tensor wide = windows.unsqueeze(2).expand({-1, -1, 4}).permute({0, 2, 1}).mean(2);
    at::Tensor block = weight.view({3, 2, 12}).narrow(0, 1, 1).squeeze(0).slice(1, 0, 8, 2);
    return out((turned * stacked + wide).tanh() + block.sum(0) * parts[0]);
  }
  at::Tensor weight;
  nn::Linear out = nullptr;
};

/// A dict of inputs: a mask as dropout would draw it, positions that all samples share, and a leaf
/// that is no tensor.
struct SeveralInputs : FamilyModule {
  explicit SeveralInputs(int64_t count) {
    left = register_module("left", nn::Linear(4, 6));
    right = register_module("right", nn::Embedding(7, 6));
    out = register_module("out", nn::Linear(6, count));
  }
  at::Tensor features(const Batch& inputs) override {
    const double factor = std::any_cast<double>(inputs["factor"].leaves().front().object);
    const at::Tensor hidden = left(inputs["numbers"].tensor()) * inputs["mask"].tensor() * factor;
    const at::Tensor words = right(inputs["nested"][0].tensor()) * inputs["nested"][1].tensor();
    return out((hidden + words.sum(1)).relu());
  }
  nn::Linear left = nullptr, out = nullptr;
  nn::Embedding right = nullptr;
};

Batch several_inputs(Draw& draw) {
  const at::Tensor positions = at::linspace(0.5, 1.5, 18, draw.options()).reshape({3, 6});
  return Batch::dict(
      {{"numbers", draw.normal({4})},
       {"mask", draw.uniform({6}).gt(0.4).to(draw.options()).div(0.6)},
       {"nested", Batch::tuple({draw.integers(0, 7, {3}), Batch(positions).shared()})},
       {"factor", Batch::object(0.7)}});
}

struct FrozenAndUnused : FamilyModule {
  explicit FrozenAndUnused(int64_t count) {
    frozen = register_module("frozen", nn::Linear(5, 7));
    trained = register_module("trained", nn::Linear(7, 7));
    unused = register_module("unused", nn::Linear(3, 3));
    out = register_module("out", nn::Linear(7, count));
    frozen->weight.set_requires_grad(false);
    trained->bias.set_requires_grad(false);
  }
  at::Tensor features(const Batch& inputs) override {
    return out(trained(frozen(inputs.tensor()).tanh()).tanh());
  }
  nn::Linear frozen = nullptr, trained = nullptr, unused = nullptr, out = nullptr;
};

struct SharedModules : FamilyModule {
  explicit SharedModules(int64_t count) {
    shared = register_module("shared", nn::Linear(6, 6));
    again = register_module("again", shared);
    sum = register_parameter("sum", at::ones({6}));
    out = register_module("out", nn::Linear(6, count));
  }
  at::Tensor features(const Batch& inputs) override {
    at::Tensor hidden = inputs.tensor();
    for (int i = 0; i < 3; ++i) hidden = (i == 1 ? again(hidden) : shared(hidden)).tanh() * sum;
    return out(hidden + at::linear(inputs.tensor(), shared->weight.t()));
  }
  nn::Linear shared = nullptr, again = nullptr, out = nullptr;
  at::Tensor sum;
};

struct ComplexParameters : FamilyModule {
  explicit ComplexParameters(int64_t count) {
    weight = register_parameter("weight", at::randn({5, 6}, at::kComplexFloat).mul_(0.5));
    phase = register_parameter("phase", at::randn({6}, at::kComplexFloat));
    out = register_module("out", nn::Linear(12, count));
  }
  at::Tensor features(const Batch& inputs) override {
    const at::Tensor spectrum = at::fft_fft(inputs.tensor(), {}, 1);
    const at::Tensor mixed = at::matmul(spectrum, weight) * phase;
    return out(at::cat({mixed.abs(), at::real(mixed * mixed.conj() + mixed)}, 1).tanh());
  }
  at::Tensor weight, phase;
  nn::Linear out = nullptr;
};

/// A layer whose weight is stored divided by `scale`: its gradient is `scale` times the usual one.
struct Scaled : FamilyModule {
  Scaled(int64_t count, double scale) : scale(scale) {
    at::Tensor start = at::randn({5, 6}).mul_(0.5);
    weight = register_parameter("weight", start.div(scale));
    bias = register_parameter("bias", at::randn({count}).mul_(0.2).div(scale));
    last = register_parameter("last", at::randn({6, count}).mul_(0.4).div(scale));
  }
  at::Tensor features(const Batch& inputs) override {
    const at::Tensor hidden = at::matmul(inputs.tensor(), weight * scale).tanh();
    return at::matmul(hidden, last * scale) + bias * scale;
  }
  double scale;
  at::Tensor weight, bias, last;
};

struct TinyGradients : Scaled {
  explicit TinyGradients(int64_t count) : Scaled(count, 1e-25) {}
};
struct HugeGradients : Scaled {
  explicit HugeGradients(int64_t count) : Scaled(count, 1e25) {}
};

/// A term of its own gradient: the input is made to require grad and differentiated inside forward.
struct GradientOfInput : FamilyModule {
  explicit GradientOfInput(int64_t count) {
    first = register_module("first", nn::Linear(4, 8));
    energy = register_module("energy", nn::Linear(8, 1));
    out = register_module("out", nn::Linear(4, count));
  }
  at::Tensor features(const Batch& inputs) override {
    const at::Tensor x = inputs.tensor().detach().requires_grad_();
    const at::Tensor total = energy(first(x).tanh()).sum();
    const at::Tensor force = torch::autograd::grad({total}, {x}, {}, true, true)[0];
    return out(force + x);
  }
  nn::Linear first = nullptr, energy = nullptr, out = nullptr;
};

/// Activation checkpointing as torch.utils.checkpoint(use_reentrant=True) does it: forward without
/// a graph, and a second forward and a whole backward inside of backward.
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  using Run = std::function<at::Tensor(const at::Tensor&)>;
  struct Holder : torch::CustomClassHolder {
    explicit Holder(Run run) : run(std::move(run)) {}
    Run run;
  };
  /// \param anchor requires grad, so that the output does
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& /*anchor*/, const Run& run) {
    context->save_for_backward({x});
    context->saved_data["run"] = c10::IValue::make_capsule(c10::make_intrusive<Holder>(run));
    const at::NoGradGuard no_grad;
    return run(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto holder = context->saved_data["run"].toCapsule();
    const at::AutoGradMode with_grad(true);
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    const at::Tensor result = static_cast<Holder&>(*holder).run(x);
    torch::autograd::backward({result}, {gradients[0]});
    return {x.grad(), at::Tensor(), at::Tensor()};
  }
};

struct Checkpointed : FamilyModule {
  explicit Checkpointed(int64_t count) {
    first = register_module("first", nn::Linear(5, 7));
    inner = register_module("inner", nn::Linear(7, 7));
    out = register_module("out", nn::Linear(7, count));
  }
  at::Tensor features(const Batch& inputs) override {
    const at::Tensor hidden = first(inputs.tensor()).tanh();
    const at::Tensor anchor = at::zeros({}, hidden.options()).requires_grad_();
    const Checkpoint::Run run = [this](const at::Tensor& x) {
      return inner(at::silu(inner(x))).tanh();
    };
    return out(Checkpoint::apply(hidden, anchor, run));
  }
  nn::Linear first = nullptr, inner = nullptr, out = nullptr;
};

}  // namespace

std::vector<Family> odd_families() {
  return {
      family<MixtureOfExperts>("mixture_of_experts", normal_inputs({5})),
      family<InPlace>("in_place", normal_inputs({6})),
      family<Views>("views", normal_inputs({6})),
      family<SeveralInputs>("several_inputs", several_inputs),
      family<FrozenAndUnused>("frozen_and_unused", normal_inputs({5})),
      family<SharedModules>("shared_modules", normal_inputs({6})),
      family<ComplexParameters>("complex_parameters", normal_inputs({5})),
      family<TinyGradients>("tiny_gradients", normal_inputs({5})),
      family<HugeGradients>("huge_gradients", normal_inputs({5})),
      family<GradientOfInput>("gradient_of_input", normal_inputs({4})),
      family<Checkpointed>("checkpointed", normal_inputs({5})),
  };
}

const std::vector<Family>& families() {
  static const std::vector<Family> all = [] {
    std::vector<Family> rows;
    for (const auto& part : {vision_families(), sequence_families(), odd_families()}) {
      rows.insert(rows.end(), part.begin(), part.end());
    }
    return rows;
  }();
  return all;
}

const Family& family_named(const std::string& name) {
  for (const Family& family : families()) {
    if (family.name == name) return family;
  }
  throw std::out_of_range("no family is called " + name);
}

}  // namespace infinitybatch::testing
