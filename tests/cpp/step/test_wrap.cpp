// Wrapped models against the models themselves. What Python adds is tested from Python.
#include "support.hpp"

#include <infinitybatch/coupled/across_batch.hpp>
#include <infinitybatch/step/wrap.hpp>

namespace infinitybatch::testing {
namespace {

/// Couples every sample with every other.
at::Tensor contrastive(const at::Tensor& outputs) {
  return at::log_softmax(outputs.mm(outputs.t()), 1).diagonal().pow(2).mean() +
         outputs.std(0).sum();
}

std::vector<at::Tensor> gradients(const at::Tensor& loss, const std::vector<at::Tensor>& leaves) {
  return torch::autograd::grad({loss}, leaves);
}

void expect_within_rounding(const std::vector<at::Tensor>& found,
                            const std::vector<at::Tensor>& wanted) {
  ASSERT_EQ(found.size(), wanted.size());
  for (size_t i = 0; i < found.size(); ++i) EXPECT_LE(error(found[i], wanted[i]), 1e-12) << i;
}

TEST(Wrap, AnyLossOfAnyModule) {
  Task task;
  const auto wanted =
      gradients(contrastive(task.net->forward(task.inputs)), task.net->parameters());
  for (const int64_t size : {1, 2, 3, 6, 7, 9}) {
    const Wrap wrapped(task.net, of_size(size));
    const at::Tensor outputs = wrapped.forward(task.inputs).tensor();
    EXPECT_LE(error(outputs, task.net->forward(task.inputs)), 1e-15);
    expect_within_rounding(gradients(contrastive(outputs), task.net->parameters()), wanted);
  }
}

TEST(Wrap, ACallableWithParametersAndANestedBatch) {
  const at::Tensor weight = at::randn({4, 3}, at::kDouble).requires_grad_();
  const at::Tensor x = at::randn({7, 4}, at::kDouble).requires_grad_();
  const at::Tensor shift = at::randn({3}, at::kDouble).requires_grad_();
  const auto compute = [&](const Batch& inputs) {
    const at::Tensor hidden = inputs["x"].tensor().mm(weight).tanh();
    return Batch::dict({{"sum", hidden + inputs["shift"].tensor()}, {"square", hidden * hidden}});
  };
  const auto loss = [](const Batch& outputs) {
    return contrastive(outputs["sum"].tensor()) * outputs["square"].tensor().sum();
  };
  const Batch inputs = Batch::dict({{"x", x}, {"shift", Batch(shift).shared()}});
  const Wrap wrapped(make_model(compute, {weight}), of_size(3));
  expect_within_rounding(gradients(loss(wrapped.forward(inputs)), {weight, x, shift}),
                         gradients(loss(compute(inputs)), {weight, x, shift}));
}

TEST(Wrap, HooksFireOnceAndGradientsOfHalfPrecisionKeepTheirType) {
  Task task;
  task.net->to(at::kBFloat16);
  int fired = 0;
  task.net->parameters()[0].register_hook([&](const at::Tensor&) { ++fired; });
  const Wrap wrapped(task.net, of_size(2));
  wrapped.forward(task.inputs.to(at::kBFloat16)).tensor().pow(2).sum().backward();
  EXPECT_EQ(fired, 1);
  EXPECT_EQ(task.net->parameters()[0].grad().scalar_type(), at::kBFloat16);
}

TEST(Wrap, WithoutGradMode) {
  Task task;
  const Wrap wrapped(task.net, of_size(2));
  const at::NoGradGuard no_grad;
  const at::Tensor outputs = wrapped.forward(task.inputs).tensor();
  EXPECT_FALSE(outputs.requires_grad());
  EXPECT_LE(error(outputs, task.net->forward(task.inputs)), 1e-15);
}

TEST(Wrap, BackwardOnceTwiceAndWithAGraph) {
  Task task;
  const Wrap wrapped(task.net, of_size(2));
  const at::Tensor loss = contrastive(wrapped.forward(task.inputs).tensor());
  expect_says(message_of<Unsupported>(
                  [&] { torch::autograd::grad({loss}, task.net->parameters(), {}, true, true); }),
              "create_graph");
  const auto once = torch::autograd::grad({loss}, task.net->parameters(), {}, true);
  expect_within_rounding(gradients(loss, task.net->parameters()), once);
  expect_says(message_of<c10::Error>([&] { gradients(loss, task.net->parameters()); }),
              "second time");
}

TEST(Wrap, AParameterThatChangedIsNoticed) {
  Task task;
  const Wrap wrapped(task.net, of_size(2));
  const at::Tensor loss = contrastive(wrapped.forward(task.inputs).tensor());
  {
    const at::NoGradGuard no_grad;
    task.net->parameters()[0].add_(1);
  }
  expect_says(message_of<StateError>([&] { loss.backward(); }), "changed in place");
  EXPECT_FALSE(task.net->parameters()[0].grad().defined());
}

TEST(Wrap, SinksMayStandInsideOthers) {
  // The outer step's gradients go through the inner node's sinks to the outer step's.
  Task task;
  const Wrap wrapped(task.net, of_size(2));
  Model model(task.net);
  model.forward = [wrapped](const Batch& inputs) { return wrapped.forward(inputs); };
  VirtualBatch(model, losses::mse(), of_size(5)).backward(task.inputs, task.targets);
  expect_gradients(*task.net, task.native_gradients());
}

TEST(Wrap, NumbersAreReduced) {
  Task task;
  for (const auto& [reduce, name] : {std::pair{Reduce::sum, "sum"}, {Reduce::mean, "mean"}}) {
    SCOPED_TRACE(name);
    Model model(task.net);
    model.forward = [&, reduce = reduce](const Batch& inputs) {
      const at::Tensor outputs = task.net->forward(inputs.tensor()).exp();
      return Batch(reduce == Reduce::sum ? outputs.sum() : outputs.mean());
    };
    const at::Tensor found =
        Wrap(model, of_size(3), {.reduce = reduce}).forward(task.inputs).tensor();
    const at::Tensor wanted = model.forward(task.inputs).tensor();
    EXPECT_LE(error(found, wanted), 1e-14);
    expect_within_rounding(gradients(found.pow(2), task.net->parameters()),
                           gradients(wanted.pow(2), task.net->parameters()));
    expect_says(message_of<BatchError>([&] { Wrap(model, of_size(3)).forward(task.inputs); }),
                "reduce=");
  }
}

TEST(Wrap, OptionsThatCannotBe) {
  Task task;
  const auto message = [&](const Options& options) {
    return message_of<InvalidArgument>([&] { Wrap(task.net, options); });
  };
  expect_says(message(of_size(0)), "is 0");
  expect_says(message({.micro_batch_size = 2, .checkpoint_segments = 2}), "use VirtualBatch");
  expect_says(message({.keep_outputs = true}), "returns the outputs of all samples");
  expect_says(message({.loss_scale = [] { return at::ones({}); }}), "before backward()");
  expect_says(message({.use_tapes = false, .static_graph = true}), "use_tapes=False forbids");
}

/// Runs of a model's forward.
Model counted(nn::Sequential net, int64_t& runs) {
  Model model(net);
  model.forward = [net, &runs](const Batch& inputs) mutable {
    ++runs;
    return Batch(net->forward(inputs.tensor()));
  };
  return model;
}

TEST(Wrap, WithoutTapesForwardRunsAgain) {
  for (const bool budget : {false, true}) {
    SCOPED_TRACE(budget);
    Task task(12);
    const auto wanted =
        gradients(contrastive(task.net->forward(task.inputs)), task.net->parameters());
    int64_t runs = 0;
    Options options = of_size(4);
    options.use_tapes = false;
    if (budget) options.memory_budget = memory::stats(at::kCPU).live + (int64_t{1} << 20);
    const Wrap wrapped(counted(task.net, runs), options);
    // Calls 1 and 2 look at rows; the third does not.
    for (int call = 0; call < 3; ++call) {
      runs = 0;
      const at::Tensor outputs = wrapped.forward(task.inputs).tensor();
      expect_within_rounding(gradients(contrastive(outputs), task.net->parameters()), wanted);
      EXPECT_EQ(wrapped.last_report()->strategy, "rerun");
      EXPECT_EQ(wrapped.last_report()->strategy_reason, "use_tapes=false was given");
    }
    EXPECT_EQ(runs, 6);
  }
}

TEST(Wrap, ShowsEachMicroBatchDetachedWithoutTargets) {
  for (const int64_t size : {3, 7}) {  // in pieces, and natively
    Task task;
    std::vector<std::pair<int64_t, int64_t>> rows;
    std::vector<at::Tensor> parts;
    Options options = of_size(size);
    options.on_micro_batch = [&](const MicroBatch& seen) {
      rows.emplace_back(seen.begin, seen.end);
      parts.push_back(seen.outputs.tensor());
      EXPECT_TRUE(seen.targets.leaves().empty());
    };
    const at::Tensor outputs = Wrap(task.net, options).forward(task.inputs).tensor();
    std::vector<std::pair<int64_t, int64_t>> wanted = {{0, 3}, {3, 6}, {6, 7}};
    if (size == 7) wanted = {{0, 7}};
    EXPECT_EQ(rows, wanted);
    EXPECT_FALSE(parts[0].requires_grad());
    EXPECT_TRUE(at::cat(parts).equal(outputs.detach()));
  }
}

TEST(Wrap, UnderABudget) {
  Task task(64, 64);
  const auto wanted =
      gradients(contrastive(task.net->forward(task.inputs)), task.net->parameters());
  Options options;
  options.memory_budget = memory::stats(at::kCPU).live + (int64_t{1} << 20);
  const Wrap wrapped(task.net, options);
  EXPECT_FALSE(wrapped.last_report().has_value());
  for (int step = 0; step < 4; ++step) {
    const memory::PeakScope peak(at::kCPU);
    const at::Tensor loss = contrastive(wrapped.forward(task.inputs).tensor());
    expect_within_rounding(gradients(loss, task.net->parameters()), wanted);
    EXPECT_LE(peak.peak(), wrapped.last_report()->memory_budget);
    EXPECT_EQ(wrapped.last_report()->restarts, 0);
  }
  // Without anything the budget is "auto".
  const Wrap automatic(task.net, {});
  expect_within_rounding(
      gradients(contrastive(automatic.forward(task.inputs).tensor()), task.net->parameters()),
      wanted);
  EXPECT_GT(automatic.last_report()->memory_budget.value(), 0);
}

TEST(Wrap, ABudgetThatIsTooSmall) {
  Task task(64, 64);
  Options options;
  options.memory_budget = memory::stats(at::kCPU).live + 512;
  const Wrap wrapped(task.net, options);
  const int64_t live = memory::stats(at::kCPU).live;
  try {
    wrapped.forward(task.inputs);
    FAIL() << "nothing was thrown";
  } catch (const BudgetExceeded& error) {
    EXPECT_GT(error.needed(), error.limit());
  }
  EXPECT_EQ(memory::stats(at::kCPU).live, live);
}

/// Two BatchNorm layers and an op of the user's own, which all see the whole batch.
struct SeesAll : nn::Module {
  SeesAll() {
    torch::manual_seed(6);
    first = register_module("first", nn::Linear(nn::LinearOptions(4, 6).bias(false)));
    norm = register_module("norm", nn::BatchNorm1d(6));
    after = register_module("after", nn::BatchNorm1d(6));
    last = register_module("last", nn::Linear(7, 5));
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto spread = [](const std::vector<at::Tensor>& all) {
      return all[0].std(0, /*unbiased=*/false).mean().expand({all[0].size(0), 1});
    };
    const at::Tensor h = norm(first(x)).tanh();
    return last(at::cat({after(h.square()), across_batch(spread, {h})}, 1));
  }
  nn::Linear first = nullptr, last = nullptr;
  nn::BatchNorm1d norm = nullptr, after = nullptr;
};

TEST(Wrap, OpsOfTheWholeBatchAreExact) {
  const auto native = std::make_shared<SeesAll>();
  const at::Tensor x = at::randn({9, 4}, at::kDouble).requires_grad_();
  auto leaves = native->parameters();
  leaves.push_back(x);
  const auto wanted = gradients(contrastive(native->forward(x)), leaves);
  for (const int64_t size : {3, 4, 8, 9}) {  // a single sample is refused by the layer itself
    SCOPED_TRACE(size);
    const auto net = std::make_shared<SeesAll>();
    std::vector<at::Tensor> own = net->parameters();
    own.push_back(x);
    const Wrap wrapped(net, of_size(size));
    const at::Tensor outputs = wrapped.forward(x).tensor();
    EXPECT_EQ(wrapped.last_report()->strategy, size < 9 ? "cut" : "native");
    const at::Tensor loss = contrastive(outputs);
    // What waits may be asked for once more.
    if (size < 9) expect_within_rounding(torch::autograd::grad({loss}, own, {}, true), wanted);
    expect_within_rounding(gradients(loss, own), wanted);
    const auto buffers = net->named_buffers();
    for (const auto& each : native->named_buffers()) {
      EXPECT_LE(error(buffers[each.key()], each.value()), 1e-12) << each.key();
    }
  }
}

TEST(Wrap, OpsOfTheWholeBatchUnderABudget) {
  const auto net = std::make_shared<SeesAll>();
  const at::Tensor x = at::randn({512, 4}, at::kDouble);
  const auto wanted = gradients(contrastive(net->forward(x)), net->parameters());
  Options options;
  options.memory_budget = memory::stats(at::kCPU).live + (int64_t{8} << 20);
  const Wrap wrapped(net, options);
  for (int step = 0; step < 3; ++step) {
    const at::Tensor loss = contrastive(wrapped.forward(x).tensor());
    expect_within_rounding(gradients(loss, net->parameters()), wanted);
    EXPECT_LE(wrapped.last_report()->peak_bytes, wrapped.last_report()->memory_budget);
    EXPECT_EQ(wrapped.last_report()->strategy, "cut");
  }
}

TEST(Wrap, ShowsMicroBatchesWhoseOpsSeeTheWholeBatch) {
  const auto net = std::make_shared<SeesAll>();
  const at::Tensor x = at::randn({9, 4}, at::kDouble);
  std::vector<at::Tensor> parts;
  Options options = of_size(4);
  options.on_micro_batch = [&](const MicroBatch& seen) { parts.push_back(seen.outputs.tensor()); };
  const Wrap wrapped(net, options);
  for (int call = 0; call < 2; ++call) {
    parts.clear();
    const at::Tensor outputs = wrapped.forward(x).tensor();
    EXPECT_EQ(wrapped.last_report()->strategy, "cut");
    EXPECT_TRUE(at::cat(parts).equal(outputs.detach()));
  }
}

TEST(Wrap, ACallbackThatThrowsLeavesNothing) {
  const auto net = std::make_shared<SeesAll>();
  const at::Tensor x = at::randn({9, 4}, at::kDouble);
  const at::Tensor mean = net->norm->running_mean.clone();
  bool throws = true;
  Options options = of_size(4);
  options.on_micro_batch = [&](const MicroBatch&) {
    if (throws) throw std::runtime_error("the metric");
  };
  const Wrap wrapped(net, options);
  EXPECT_THROW(wrapped.forward(x), std::runtime_error);
  EXPECT_TRUE(net->norm->running_mean.equal(mean));
  throws = false;
  wrapped.forward(x).tensor().sum().backward();
}

TEST(Wrap, WhereOthersDoNotAgreeNoGradientLeaves) {
  Task task;
  WrapOptions own;
  int asked = 0;
  bool others_failed = true;
  own.agree = [&](const std::exception_ptr& error) {
    ++asked;
    EXPECT_EQ(error, nullptr);
    if (others_failed) throw StateError("another rank has failed");
  };
  const Wrap wrapped(task.net, of_size(2), own);
  const auto step = [&](int64_t rows) {
    contrastive(wrapped.forward(task.inputs.narrow(0, 0, rows)).tensor()).backward();
  };
  expect_says(message_of<StateError>([&] { step(7); }), "another rank");
  EXPECT_FALSE(task.net->parameters()[0].grad().defined());
  others_failed = false;
  step(7);
  EXPECT_TRUE(task.net->parameters()[0].grad().defined());
  step(2);  // a single micro-batch: the others may have several
  EXPECT_EQ(asked, 3);
}

TEST(Wrap, NothingIsKept) {
  Task task;
  const Wrap wrapped(task.net, of_size(2));
  const auto step = [&] {
    contrastive(wrapped.forward(task.inputs).tensor()).backward();
    wrapped.forward(task.inputs);
  };
  step();
  const int64_t live = memory::stats(at::kCPU).live;
  for (int i = 0; i < 3; ++i) step();
  EXPECT_EQ(memory::stats(at::kCPU).live, live);
}

}  // namespace
}  // namespace infinitybatch::testing
