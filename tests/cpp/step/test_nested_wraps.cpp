// Wrapped models inside of what steps compute: they compute plainly, as parts of it. In a file of
// its own so that one run under AddressSanitizer goes through every entry.
#include "support.hpp"

#include <infinitybatch/step/bench.hpp>
#include <infinitybatch/step/verify.hpp>
#include <infinitybatch/step/wrap.hpp>
#include <infinitybatch/train/evaluation.hpp>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace infinitybatch::testing {
namespace {

at::Tensor contrast_of(const at::Tensor& outputs) {
  return at::log_softmax(outputs.mm(outputs.t()), 1).diagonal().pow(2).mean() +
         outputs.std(0).sum();
}

Options options_of(const std::string& name) {
  Options options;
  if (name == "budget") {
    options.memory_budget = "64MiB";
  } else if (name == "tight") {
    options.memory_budget = memory::live(at::kCPU) + (int64_t{48} << 10);
  } else {
    options.micro_batch_size = 3;
    options.static_graph = name == "static_graph";
  }
  return options;
}

const std::vector<std::string> kOptions = {"size", "budget", "tight", "static_graph", "batch_norm"};

/// A part between two layers, called twice.
struct Nested {
  explicit Nested(const std::string& option) {
    torch::manual_seed(7);
    part = nn::Sequential(nn::Linear(4, 6), nn::Tanh(), nn::Linear(6, 4));
    if (option == "batch_norm") part->push_back(nn::BatchNorm1d(4));
    front = nn::Linear(4, 4);
    for (nn::Module* module : std::vector<nn::Module*>{part.get(), front.get()}) {
      module->to(at::kDouble);
    }
    inputs = at::randn({8, 4}, at::kDouble);
    targets = at::randn({8, 4}, at::kDouble);
  }

  using Call = std::function<at::Tensor(const at::Tensor&)>;

  Call plain() const {
    return [net = part](const at::Tensor& x) mutable { return net->forward(x); };
  }
  /// \param times how often it is wrapped
  Call wrapped(const Options& options, int times = 1) const {
    Model model = part;
    std::shared_ptr<Wrap> wrap;
    for (int i = 0; i < times; ++i) {
      wrap = std::make_shared<Wrap>(model, options);
      model.forward = [wrap](const Batch& given) { return wrap->forward(given); };
    }
    return [wrap](const at::Tensor& x) { return wrap->forward(x).tensor(); };
  }
  /// The whole, with the part computed by `call`.
  Model around(const Call& call) const {
    Model model = part;
    const Model own = front;
    const auto both = [own, inner = model] {
      auto all = own.parameters();
      const auto more = inner.parameters();
      all.insert(all.end(), more.begin(), more.end());
      return all;
    };
    model.parameters = both;
    model.forward = [net = front, call](const Batch& given) mutable {
      const at::Tensor hidden = net->forward(given.tensor());
      return Batch(call(hidden) + call(hidden.tanh()));
    };
    return model;
  }

  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> all = front->parameters();
    for (const at::Tensor& parameter : part->parameters()) all.push_back(parameter);
    return all;
  }
  /// The gradients, of which none is left.
  std::vector<at::Tensor> take() const {
    std::vector<at::Tensor> gradients;
    for (at::Tensor& parameter : parameters()) {
      gradients.push_back(std::exchange(parameter.mutable_grad(), at::Tensor()));
    }
    return gradients;
  }
  std::vector<at::Tensor> native(bool coupled) const {
    const at::Tensor outputs = around(plain()).forward(inputs).tensor();
    (coupled ? contrast_of(outputs) : at::mse_loss(outputs, targets)).backward();
    return take();
  }

  nn::Sequential part = nullptr;
  nn::Linear front = nullptr;
  at::Tensor inputs, targets;
};

void expect_close(const std::vector<at::Tensor>& found, const std::vector<at::Tensor>& wanted,
                  const std::string& what) {
  ASSERT_EQ(found.size(), wanted.size());
  double largest = 0;  // in front of BatchNorm a bias has no gradient but rounding
  for (const at::Tensor& each : wanted) largest = std::max(largest, each.norm().item<double>());
  for (size_t i = 0; i < found.size(); ++i) {
    const double difference = (found[i] - wanted[i]).norm().item<double>();
    EXPECT_LE(difference, 1e-11 * largest) << what << ", parameter " << i;
  }
}

Loss loss_of(bool coupled) {
  if (!coupled) return losses::mse();
  return losses::coupled(
      [](const Batch& outputs, const Batch&) { return contrast_of(outputs.tensor()); });
}

TEST(NestedWraps, APartOfAWrappedModelAndOfAStep) {
  for (const std::string& option : kOptions) {
    for (const int times : {1, 2}) {
      const Nested nested(option);
      const Model model = nested.around(nested.wrapped(options_of(option), times));
      for (const bool coupled : {true, false}) {
        const std::string what = option + (coupled ? " coupled" : " separable");
        const auto wanted = nested.native(coupled);
        const Wrap wrap(model, options_of(option));
        VirtualBatch batch(model, loss_of(coupled), options_of(option));
        for (int step = 0; step < 3; ++step) {
          const at::Tensor outputs = wrap.forward(nested.inputs).tensor();
          (coupled ? contrast_of(outputs) : at::mse_loss(outputs, nested.targets)).backward();
          expect_close(nested.take(), wanted, "Wrap, " + what);
          batch.backward(nested.inputs, nested.targets);
          expect_close(nested.take(), wanted, "VirtualBatch, " + what);
        }
      }
    }
  }
}

TEST(NestedWraps, VerifyBenchAndEvaluation) {
  for (const std::string& option : kOptions) {
    const Nested nested(option);
    const Model model = nested.around(nested.wrapped(options_of(option)));
    const VerifyReport report =
        verify(model, losses::mse(), nested.inputs, nested.targets, options_of(option));
    EXPECT_TRUE(report.exact()) << option << report.explain();
    Options measured = options_of(option);
    measured.static_graph = false;  // one of the strategies runs without tapes
    const BenchReport times =
        bench(model, losses::mse(), nested.inputs, nested.targets, measured, {1, 60});
    EXPECT_FALSE(times.strategies.empty()) << option;
    Evaluation evaluation(model, losses::mse(), options_of(option));
    evaluation.add(Batch(nested.inputs), Batch(nested.targets));
    EXPECT_TRUE(std::isfinite(evaluation.loss())) << option;
  }
}

/// Of what a loss's own model is given in the middle of a step.
TEST(NestedWraps, InTheLoss) {
  for (const bool coupled : {false, true}) {
    Task task(/*samples=*/8);
    const nn::Linear judge(2, 2);
    nn::Linear(judge)->to(at::kDouble);
    const auto value = [&](const at::Tensor& outputs, const at::Tensor& targets) {
      return at::mse_loss(outputs, targets, at::Reduction::Sum);
    };
    std::vector<at::Tensor> leaves = task.net->parameters();
    for (const at::Tensor& leaf : judge->parameters()) leaves.push_back(leaf);
    const auto wanted = torch::autograd::grad(
        {value(nn::Linear(judge)->forward(task.net->forward(task.inputs)), task.targets)}, leaves);
    const Wrap wrapped(judge, of_size(2));
    const auto sum = [&](const Batch& outputs, const Batch& targets) {
      return value(wrapped.forward(outputs).tensor(), targets.tensor());
    };
    const Loss loss = coupled ? Loss(losses::coupled(sum)) : Loss(losses::separable(sum, nullptr));
    VirtualBatch(task.net, loss, of_size(3)).backward(task.inputs, task.targets);
    for (size_t i = 0; i < leaves.size(); ++i) {
      EXPECT_LE(error(leaves[i].grad(), wanted[i]), 1e-12) << coupled << i;
    }
  }
}

/// Two wraps of one model that run backward together.
TEST(NestedWraps, OneModelInTwo) {
  for (const std::string& option : kOptions) {
    const Nested nested(option);
    const Model model = nested.around(nested.plain());
    const at::Tensor more = nested.inputs.flip(0) + 1;
    const auto loss = [](const at::Tensor& one, const at::Tensor& other) {
      return contrast_of(one) + other.pow(2).mean();
    };
    loss(model.forward(nested.inputs).tensor(), model.forward(more).tensor()).backward();
    const auto wanted = nested.take();
    const Wrap first(model, options_of(option));
    const Wrap second(model, of_size(2));
    for (int step = 0; step < 3; ++step) {
      loss(first.forward(nested.inputs).tensor(), second.forward(more).tensor()).backward();
      expect_close(nested.take(), wanted, option);
    }
  }
}

}  // namespace
}  // namespace infinitybatch::testing
