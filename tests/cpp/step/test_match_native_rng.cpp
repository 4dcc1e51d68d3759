// `match_native_rng`: the whole batch's random numbers in micro-batches, without Python.
#include "step/support.hpp"

#include <ATen/CPUGeneratorImpl.h>

namespace infinitybatch::testing {
namespace {

/// Dropout in pieces, normal numbers for the whole batch, numbers for all samples alike, and those
/// of a generator of the user's own.
struct NoisyImpl : nn::Module {
  NoisyImpl() {
    register_module("first", first);
    register_module("last", last);
  }
  at::Tensor forward(at::Tensor x) {
    x = at::dropout(first(x).tanh(), 0.3, is_training());
    if (is_training()) {
      x = x + 0.1 * at::randn_like(x) + at::rand({6}, x.options());
      x = x * at::empty_like(x).bernoulli_(0.8, own);
    }
    return last(x);
  }
  nn::Linear first = nn::Linear(4, 6), last = nn::Linear(6, 2);
  at::Generator own = at::detail::createCPUGenerator(11);
};
TORCH_MODULE(Noisy);

struct Draws {
  Draws() {
    torch::manual_seed(3);
    net->to(at::kDouble);
    inputs = at::randn({11, 4}, at::kDouble);
    targets = at::randn({11, 2}, at::kDouble);
  }
  void seed() {
    torch::manual_seed(5);
    net->own.set_current_seed(5);
  }
  std::vector<at::Tensor> states() const {
    return {at::globalContext().defaultGenerator(at::kCPU).get_state(), net->own.get_state()};
  }
  Noisy net;
  at::Tensor inputs, targets;
};

Options matching(int64_t size) {
  Options options = of_size(size);
  options.match_native_rng = true;
  return options;
}

void expect_same(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(a[i].equal(b[i])) << "generator " << i;
}

TEST(MatchNativeRng, NumbersAndGeneratorsAreTheWholeBatchs) {
  Draws draws;
  draws.seed();
  const at::Tensor loss = at::mse_loss(draws.net->forward(draws.inputs), draws.targets);
  const auto wanted = torch::autograd::grad({loss}, draws.net->parameters());
  const auto after = draws.states();
  for (const int64_t size : {1, 3, 4, 10, 11}) {
    for (const int64_t retained : {0, 2}) {
      Options options = matching(size);
      options.retained_micro_batches = retained;
      draws.seed();
      draws.net->zero_grad();
      VirtualBatch batch(draws.net, losses::mse(), options);
      const StepReport report = batch.backward(draws.inputs, draws.targets);
      EXPECT_LE(error(report.loss, loss), 1e-13);
      expect_gradients(*draws.net, wanted);
      expect_same(draws.states(), after);
    }
  }
}

TEST(MatchNativeRng, APlanLeavesGeneratorsAlone) {
  Draws draws;
  draws.seed();
  const auto before = draws.states();
  VirtualBatch batch(draws.net, losses::mse(), matching(4));
  batch.plan(draws.inputs, draws.targets);
  expect_same(draws.states(), before);
}

TEST(MatchNativeRng, WithoutItMicroBatchesDrawForThemselves) {
  Draws draws;
  draws.seed();
  const at::Tensor loss = at::mse_loss(draws.net->forward(draws.inputs), draws.targets);
  draws.seed();
  VirtualBatch batch(draws.net, losses::mse(), of_size(4));
  EXPECT_GT(error(batch.backward(draws.inputs, draws.targets).loss, loss), 1e-3);
}

TEST(MatchNativeRng, InEvalNothingIsCut) {
  Draws draws;
  draws.net->eval();
  VirtualBatch batch(draws.net, losses::mse(), matching(4));
  EXPECT_EQ(batch.backward(draws.inputs, draws.targets).strategy, "stream");
}

TEST(MatchNativeRng, FusedDrawsAreRefusedByName) {
  torch::manual_seed(3);
  struct Recurrent : nn::Module {
    Recurrent() { register_module("lstm", lstm); }
    at::Tensor forward(const at::Tensor& x) {
      return std::get<0>(lstm(x.unsqueeze(1))).select(1, 0);
    }
    nn::LSTM lstm{nn::LSTMOptions(4, 2).num_layers(2).dropout(0.5).batch_first(true)};
  };
  const auto net = std::make_shared<Recurrent>();
  const at::Tensor inputs = at::randn({8, 4});
  VirtualBatch batch(net, losses::mse(), matching(4));
  const std::string message =
      message_of<CouplingError>([&] { batch.backward(inputs, at::randn({8, 2})); });
  expect_says(message, "aten::lstm");
  expect_says(message, "inside of a larger op");
}

TEST(MatchNativeRng, Misuse) {
  Draws draws;
  Options options = matching(4);
  options.use_tapes = false;
  message_of<InvalidArgument>([&] { VirtualBatch(draws.net, losses::mse(), options); });
  options = matching(4);
  options.batch_coupling = BatchCoupling::per_micro_batch;
  message_of<InvalidArgument>([&] { VirtualBatch(draws.net, losses::mse(), options); });
}

}  // namespace
}  // namespace infinitybatch::testing
