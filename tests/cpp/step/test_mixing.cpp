// Ordinary ops that mix samples: refused by name where micro-batches are parts of the batch, let be
// where nothing is mixed.
#include "core/exchange.hpp"
#include "step/support.hpp"

#include <infinitybatch/coupled/across_batch.hpp>
#include <infinitybatch/step/verify.hpp>
#include <infinitybatch/step/wrap.hpp>

namespace infinitybatch::testing {
namespace {

using Mix = std::function<at::Tensor(const at::Tensor&)>;

struct Mixer : nn::Module {
  explicit Mixer(Mix function) : mix(std::move(function)) {
    torch::manual_seed(9);
    body = register_module("body", nn::Linear(4, 6));
    head = register_module("head", nn::Linear(6, 2));
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    ++calls;
    return head(mix(body(x).tanh()));
  }
  Mix mix;
  nn::Linear body{nullptr}, head{nullptr};
  int calls = 0;
};

at::Tensor centred(const at::Tensor& h) {
  return h - h.mean(0);
}

std::string op_of(const std::function<void()>& step) {
  try {
    step();
  } catch (const CouplingError& error) {
    expect_says(error.what(), "across_batch");
    return error.op();
  }
  return "none";
}

const CoupledLoss& spread() {
  static const CoupledLoss loss =
      losses::coupled([](const Batch& outputs, const Batch&) { return outputs.tensor().std(); });
  return loss;
}

TEST(Mixing, IsRefusedByNameInEveryWay) {
  const at::Tensor x = at::randn({8, 4}, at::kDouble), y = at::randn({8, 2}, at::kDouble);
  const std::vector<std::pair<Mix, std::string>> mixers{
      {centred, "aten::mean"},
      {[](const at::Tensor& h) { return h.cumsum(0); }, "aten::cumsum"},
      {[](const at::Tensor& h) { return h.roll(1, 0); }, "aten::roll"},
      {[](const at::Tensor& h) { return h * h.softmax(0); }, "aten::softmax"},
  };
  for (const auto& [mix, op] : mixers) {
    for (const int64_t size : {2, 3, 4}) {
      const auto net = std::make_shared<Mixer>(mix);
      EXPECT_EQ(op_of([&] { VirtualBatch(net, losses::mse(), of_size(size)).backward(x, y); }), op);
      EXPECT_EQ(op_of([&] { VirtualBatch(net, spread(), of_size(size)).backward(x, y); }), op);
      Options options;
      options.micro_batch_size = size;
      EXPECT_EQ(op_of([&] { Wrap(net, options).forward(x); }), op);
      const at::NoGradGuard no_grad;
      EXPECT_EQ(op_of([&] { Wrap(net, options).forward(x); }), op);
      for (const at::Tensor& each : net->parameters()) EXPECT_FALSE(each.grad().defined());
    }
  }
}

TEST(Mixing, AcrossTheBatchItIsExact) {
  const at::Tensor x = at::randn({8, 4}, at::kDouble), y = at::randn({8, 2}, at::kDouble);
  const auto net = std::make_shared<Mixer>([](const at::Tensor& h) {
    return across_batch([](const std::vector<at::Tensor>& all) { return centred(all[0]); }, {h});
  });
  const auto wanted = torch::autograd::grad({at::mse_loss(net->forward(x), y)}, net->parameters());
  VirtualBatch(net, losses::mse(), of_size(3)).backward(x, y);
  for (size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_LE(error(net->parameters()[i].grad(), wanted[i]), 1e-12) << i;
  }
}

TEST(Mixing, WhatMixesNothingRunsOnceForEachMicroBatch) {
  const at::Tensor x = at::randn({8, 4}, at::kDouble), y = at::randn({8, 2}, at::kDouble);
  const auto net = std::make_shared<Mixer>([](const at::Tensor& h) {
    return h.softmax(1).cumsum(1) - h.max().detach() + h.max().detach();
  });
  VirtualBatch batch(net, losses::mse(), of_size(2));
  const std::vector<int64_t> looks = {4, 4, 0, 4, 0};  // at rows of other splits
  for (const int64_t look : looks) {
    net->calls = 0;
    batch.backward(x, y);
    EXPECT_EQ(net->calls, 4 + look);
  }
}

TEST(Mixing, NumbersThatCountSamplesAreNamed) {
  const at::Tensor x = at::randn({8, 4}, at::kDouble), y = at::randn({8, 2}, at::kDouble);
  const std::vector<std::pair<Mix, std::string>> counts{
      {[](const at::Tensor& h) { return h / h.size(0); }, "aten::div"},
      {[](const at::Tensor& h) { return h * (1.0 / static_cast<double>(h.size(0))); }, "aten::mul"},
      {[](const at::Tensor& h) { return at::add(h, h.sin(), h.size(0)); }, "aten::add"},
  };
  for (const auto& [count, op] : counts) {
    for (const int64_t size : {3, 4, 5}) {
      const auto net = std::make_shared<Mixer>(count);
      const auto expect_named = [&](const std::function<void()>& step) {
        try {
          step();
          ADD_FAILURE() << op << " in micro-batches of " << size;
        } catch (const CouplingError& error) {
          EXPECT_EQ(error.op(), op);
          expect_says(error.what(), "a number that counts the samples");
        }
      };
      expect_named([&] { VirtualBatch(net, losses::mse(), of_size(size)).backward(x, y); });
      expect_named([&] { VirtualBatch(net, spread(), of_size(size)).backward(x, y); });
      Options options;
      options.micro_batch_size = size;
      expect_named([&] { Wrap(net, options).forward(x); });
      for (const at::Tensor& each : net->parameters()) EXPECT_FALSE(each.grad().defined());
    }
  }
}

TEST(Mixing, ASourceThatGivesOtherRowsIsNoticed) {
  const at::Tensor y = at::randn({8, 2}, at::kDouble);
  const auto net = std::make_shared<Mixer>([](const at::Tensor& h) { return h; });
  const BatchSource inputs{
      8, [](int64_t begin, int64_t end) { return at::randn({end - begin, 4}, at::kDouble); }};
  try {
    VirtualBatch(net, spread(), of_size(2)).backward(inputs, BatchSource::from(y, "targets"));
    FAIL();
  } catch (const BatchError& error) {
    expect_says(error.what(), "gave other values for samples");
  }
  VirtualBatch(net, losses::mse(), of_size(2))
      .backward(inputs, BatchSource::from(y, "targets"));  // streamed: asked once
}

TEST(Mixing, LayoutsOfOutputsAreToldApart) {
  const at::Tensor x = at::randn({2, 2}, at::kDouble);
  const Exchanges exchanges = *exchanges_of(x, 2);
  const auto look = [&](const Mix& function) {
    const at::Tensor as_is = function(x);
    return mixes(differences(as_is, function(exchanged(x, 0, exchanges.others)), 2),
                 differences(as_is, function(exchanged(x, 0, exchanges.itself)), 2), as_is.sizes(),
                 exchanges);
  };
  EXPECT_FALSE(look([](const at::Tensor& each) { return each.exp(); }));
  EXPECT_FALSE(look([](const at::Tensor& each) { return each.exp().t(); }));
  EXPECT_FALSE(look([](const at::Tensor& each) { return each.reshape({4, 1}); }));
  EXPECT_TRUE(look([](const at::Tensor& each) { return each.flip(0); }));
  EXPECT_TRUE(look([](const at::Tensor& each) { return each.cumsum(0); }));
  EXPECT_TRUE(look([](const at::Tensor& each) { return each.flip(0).cumsum(0).flip(0); }));
  EXPECT_TRUE(look([](const at::Tensor& each) { return (each - each.mean(0)).reshape({4, 1}); }));
  EXPECT_FALSE(look([](const at::Tensor& each) { return at::ones_like(each); }));
  EXPECT_FALSE(exchanges_of(x.narrow(0, 0, 1), 1).has_value());
  EXPECT_FALSE(exchanges_of(at::ones({3, 2}), 3).has_value());
}

}  // namespace
}  // namespace infinitybatch::testing
