// verify: exact steps are found exact, others are not, and nothing is left behind.
#include "step/support.hpp"

#include <infinitybatch/step/verify.hpp>

namespace infinitybatch::testing {
namespace {

struct Shaped : nn::Module {
  explicit Shaped(std::function<at::Tensor(const at::Tensor&)> function)
      : shape(std::move(function)) {
    torch::manual_seed(9);
    body = register_module("body", nn::Linear(4, 6));
    head = register_module("head", nn::Linear(6, 2));
    steps = register_buffer("steps", at::zeros({2}));
  }
  at::Tensor forward(const at::Tensor& x) {
    steps.add_(1);
    return head(shape(body(x).tanh()));
  }
  std::function<at::Tensor(const at::Tensor&)> shape;
  nn::Linear body{nullptr}, head{nullptr};
  at::Tensor steps;
};

struct Verify : ::testing::Test {
  at::Tensor x = at::randn({7, 4}), y = at::randn({7, 2});
  VerifyReport look(const std::shared_ptr<Shaped>& net, Options options,
                    const Loss& loss = losses::mse(),
                    const std::optional<CoupledLoss>& native = std::nullopt) const {
    const auto type = net->head->weight.scalar_type();
    return verify(net, loss, Batch(x.to(type)), Batch(y.to(type)), options, native);
  }
};

at::Tensor as_it_is(const at::Tensor& h) {
  return h;
}

TEST_F(Verify, AnExactStepIsFoundExactAndLeavesNothing) {
  const auto net = std::make_shared<Shaped>(as_it_is);
  const at::Tensor weight = net->head->weight.detach().clone();
  const VerifyReport report = look(net, of_size(2));
  EXPECT_TRUE(report.exact()) << report.explain();
  ASSERT_TRUE(report.in_fp64.has_value());
  EXPECT_LE(report.in_fp64->worst()->error, 1e-12);
  EXPECT_EQ(report.own.type, at::kFloat);
  EXPECT_EQ(report.micro_batch_sizes, (std::vector<int64_t>{2, 2, 2, 1}));
  EXPECT_FALSE(report.coupled_output.has_value());
  EXPECT_EQ(net->head->weight.scalar_type(), at::kFloat);
  EXPECT_TRUE(at::equal(net->head->weight, weight));
  EXPECT_TRUE(at::equal(net->steps, at::zeros({2})));
  for (const at::Tensor& each : net->parameters()) EXPECT_FALSE(each.grad().defined());
}

TEST_F(Verify, AnotherLossIsNotExact) {
  const auto net = std::make_shared<Shaped>(as_it_is);
  const CoupledLoss twice = losses::coupled([](const Batch& outputs, const Batch& targets) {
    return 2 * at::mse_loss(outputs.tensor(), targets.tensor());
  });
  const VerifyReport report = look(net, of_size(2), losses::mse(), twice);
  EXPECT_FALSE(report.exact());
  EXPECT_NEAR(report.in_fp64->worst()->error, 0.5, 1e-12);
  expect_says(report.explain(), "NOT EXACT");
}

TEST_F(Verify, SamplesThatDependOnEarlierOnesAreNamed) {
  Options options = of_size(2);
  options.batch_coupling = BatchCoupling::per_micro_batch;
  for (const bool backwards : {false, true}) {
    const auto net = std::make_shared<Shaped>([backwards](const at::Tensor& h) {
      return backwards ? h.flip(0).cumsum(0).flip(0) : h.cumsum(0);
    });
    const VerifyReport report = look(net, options);
    EXPECT_FALSE(report.exact());
    EXPECT_EQ(report.coupled_output.value_or("none"), "outputs");
  }
}

TEST_F(Verify, AnOrderThatMattersIsNoRounding) {
  Options options = of_size(2);
  options.batch_coupling = BatchCoupling::per_micro_batch;
  const auto net =
      std::make_shared<Shaped>([](const at::Tensor& h) { return h + 1e-6 * h.cumsum(0); });
  net->to(at::kDouble);
  const VerifyReport report = look(net, options);
  EXPECT_FALSE(report.exact());
  EXPECT_EQ(report.in_fp64->worst()->allowed, 1e-12);
  EXPECT_EQ(report.own.parameters.size(), report.in_fp64->parameters.size());
  const std::string said = report.explain();
  EXPECT_EQ(said.find("fp64:"), said.rfind("fp64:"));
}

TEST_F(Verify, NumbersOfAGeneratorOfItsOwnDoNotRepeat) {
  const at::Generator own = at::detail::createCPUGenerator(1);
  const auto net = std::make_shared<Shaped>(
      [own](const at::Tensor& h) { return h * at::randn(h.sizes(), own, h.options()); });
  const std::string said = message_of<Unsupported>([&] { look(net, of_size(2)); });
  expect_says(said, "not repeatable");
}

TEST_F(Verify, DrawsAreComparedWhereTheyMatchNative) {
  const auto net =
      std::make_shared<Shaped>([](const at::Tensor& h) { return at::dropout(h, 0.4, true); });
  expect_says(message_of<Unsupported>([&] { look(net, of_size(2)); }), "match_native_rng");
  Options options = of_size(2);
  options.match_native_rng = true;
  const VerifyReport report = look(net, options);
  EXPECT_TRUE(report.exact()) << report.explain();
}

}  // namespace
}  // namespace infinitybatch::testing
