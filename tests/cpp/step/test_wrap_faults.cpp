// Contract 3 for the backward of a wrapped model: what fails there leaves what forward left, and a
// graph that was to be kept is good for another backward. Python's part is tested from Python.
#include "core/rng.hpp"
#include "memory/failure_injection.hpp"
#include "step/support.hpp"
#include "step/world.hpp"

#include <infinitybatch/step/wrap.hpp>

namespace infinitybatch::testing {
namespace {

/// A kind of world, whose code runs again, for it is no tape's; or a network whose tape is replayed
/// ("replay"), or goes from cut to cut ("cut").
class WrapFaults : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { at::set_num_threads(1); }

  /// One call whose backward is yet to come.
  struct Call {
    explicit Call(const std::string& kind, bool budget) {
      options.micro_batch_size = 4;
      if (budget) options.memory_budget = memory::stats(at::kCPU).live + (int64_t{16} << 20);
      // Afterwards gradients leave the node, and torch's accumulators take them one by one.
      own.agree = [this](const std::exception_ptr&) {
        if (leaving) leaving();
      };
      if (kind != "replay" && kind != "cut") {
        world = std::make_unique<World>(kind, Randomness::dropout);
        for (const NamedParameter& leaf : world->leaves()) leaves.push_back(leaf.tensor);
        buffers = world->buffers();
        begin(world->model(), world->inputs().rows(0, World::kSamples));
        return;
      }
      torch::manual_seed(3);
      net = nn::Sequential(nn::Linear(4, 5), nn::Tanh(), nn::Dropout(0.3), nn::Linear(5, 2));
      if (kind == "cut") net->push_back(nn::BatchNorm1d(2));
      net->to(at::kDouble);
      leaves = net->parameters();
      buffers = net->buffers();
      leaves[0].mutable_grad() = at::randn_like(leaves[0]).detach();
      begin(net, at::randn({8, 4}, at::kDouble));
    }

    void begin(const Model& model, const Batch& inputs) {
      wrapped = std::make_unique<Wrap>(model, options, own);
      loss = wrapped->forward(inputs).tensor().square().sum();
    }
    void backward() const { loss.backward({}, /*retain_graph=*/true); }

    /// Objects and values of `.grad`, values of the rest, random state.
    std::vector<at::Tensor> state() const {
      std::vector<at::Tensor> all;
      for (const at::Tensor& leaf : leaves) {
        all.push_back(leaf.detach().clone());
        all.push_back(leaf.grad().defined() ? leaf.grad().clone() : at::Tensor());
      }
      for (const at::Tensor& buffer : buffers) all.push_back(buffer.clone());
      all.push_back(state_of(at::globalContext().defaultGenerator(at::kCPU)));
      return all;
    }
    std::vector<c10::TensorImpl*> objects() const {
      std::vector<c10::TensorImpl*> all;
      for (const at::Tensor& leaf : leaves) all.push_back(leaf.grad().unsafeGetTensorImpl());
      return all;
    }

    Options options;
    WrapOptions own;
    std::function<void()> leaving;
    std::unique_ptr<World> world;
    nn::Sequential net = nullptr;
    std::vector<at::Tensor> leaves, buffers;
    std::unique_ptr<Wrap> wrapped;
    at::Tensor loss;
  };

  static void expect_same(const std::vector<at::Tensor>& found,
                          const std::vector<at::Tensor>& wanted) {
    ASSERT_EQ(found.size(), wanted.size());
    for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(same_bits(found[i], wanted[i])) << i;
  }

  /// A backward that `fail` lets fail, with an Exception; then one that nothing disturbs.
  template <typename Exception, typename Fault>
  static void fail(const Call& call, int64_t place, const std::vector<at::Tensor>& wanted) {
    const std::vector<at::Tensor> before = call.state();
    const auto objects = call.objects();
    const int64_t live = memory::stats(at::kCPU).live;
    {
      const Fault fault(place);
      EXPECT_THROW(call.backward(), Exception);
    }
    EXPECT_LE(memory::stats(at::kCPU).live, live);
    EXPECT_EQ(call.objects(), objects);
    expect_same(call.state(), before);
    call.backward();
    expect_same(call.state(), wanted);
  }

  /// Lets backward fail at each of its places, all or a sample of them; tells how many those were.
  template <typename Exception, typename Fault>
  static int64_t fail_everywhere(bool budget) {
    {
      const Call warm_up(GetParam(), budget);
      warm_up.backward();
    }
    Call reference(GetParam(), budget);
    int64_t count = 0;
    {
      const Fault counting(Fault::kNever);
      reference.leaving = [&] { count = counting.seen(); };
      reference.backward();
    }
    reference.leaving = nullptr;
    const std::vector<at::Tensor> wanted = reference.state();
    for (const int64_t place : places(count)) {
      SCOPED_TRACE("place " + std::to_string(place) + " of " + std::to_string(count));
      fail<Exception, Fault>(Call(GetParam(), budget), place, wanted);
      if (HasFailure()) break;
    }
    return count;
  }
};

TEST_P(WrapFaults, BackwardSurvivesAFailureOfAnyAllocation) {
  const int64_t count =
      fail_everywhere<c10::OutOfMemoryError, memory::FailAllocation>(/*budget=*/false);
  EXPECT_GT(count, 30);
}

TEST_P(WrapFaults, BackwardUnderABudgetSurvivesAFailureOfAnyAllocation) {
  const int64_t count =
      fail_everywhere<c10::OutOfMemoryError, memory::FailAllocation>(/*budget=*/true);
  EXPECT_GT(count, 30);
}

TEST_P(WrapFaults, BackwardSurvivesAnExceptionAnywhereInUserCode) {
  const int64_t count = fail_everywhere<Tripped, Tripwires>(/*budget=*/false);
  const bool user_code = GetParam() != "replay" && GetParam() != "cut";
  EXPECT_EQ(count > 10, user_code);
}

std::vector<std::string> kinds() {
  std::vector<std::string> all = World::kinds();
  all.insert(all.end(), {"replay", "cut"});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Step, WrapFaults, ::testing::ValuesIn(kinds()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace infinitybatch::testing
