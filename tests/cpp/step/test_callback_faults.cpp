// What fails inside of a callback of torch's ends the step, or is answered by a smaller plan: torch
// only logs it, so whoever went on would believe a watch or a recording that has missed an op.
#include "core/callback_errors.hpp"
#include "core/rng.hpp"
#include "coupled/fixed_ops.hpp"
#include "memory/failure_injection.hpp"
#include "step/support.hpp"
#include "step/world.hpp"

#include <infinitybatch/coupled/across_batch.hpp>
#include <infinitybatch/step/wrap.hpp>

#include <numeric>

namespace infinitybatch::testing {
namespace {

/// With what callbacks make copies for: a parameter that forward writes, a constant that is written
/// outside of the dispatcher, a buffer, rows that max_norm scales, draws.
struct BusyImpl : nn::Module {
  explicit BusyImpl(std::string of_kind) : kind(std::move(of_kind)) {
    register_module("first", first);
    register_module("words", words);
    register_module("norm", norm);
    register_module("last", last);
    steps = register_buffer("steps", at::zeros({3}, at::kDouble));
    to(at::kDouble);
  }
  bool is(const char* part) const { return kind.find(part) != std::string::npos; }
  at::Tensor forward(const at::Tensor& x) {
    if (!is("checkpoint")) {
      const at::NoGradGuard no_grad;
      if (is("stream")) first->bias.clamp_(-0.2, 0.2);
      steps.add_(1);
    }
    at::Tensor hidden = first(x).tanh();
    if (!is("checkpoint")) hidden = hidden + words(x.select(1, 0).gt(0).to(at::kLong));
    at::Tensor scales = at::empty({6}, at::kDouble);
    std::iota(scales.data_ptr<double>(), scales.data_ptr<double>() + 6, 0.5);
    hidden = hidden * scales;
    if (is("cut") || is("static")) hidden = normalised(hidden);
    if (is("across")) hidden = hidden + across_batch(&spread, {hidden});
    if (is("match")) hidden = at::dropout(at::dropout(hidden, 0.3, true).tanh(), 0.3, true);
    return last(hidden.tanh()) + steps.sum();
  }
  static at::Tensor spread(const std::vector<at::Tensor>& x) {
    return x[0].mean(0, /*keepdim=*/true).expand_as(x[0]).clone();
  }
  /// The module itself refuses single samples.
  at::Tensor normalised(const at::Tensor& x) {
    return at::batch_norm(x, norm->weight, norm->bias, norm->running_mean, norm->running_var,
                          /*training=*/true, /*momentum=*/0.1, /*eps=*/1e-5,
                          /*cudnn_enabled=*/false);
  }

  std::string kind;
  nn::Linear first = nn::Linear(4, 6), last = nn::Linear(6, 2);
  nn::Embedding words = nn::Embedding(nn::EmbeddingOptions(2, 6).max_norm(1.0));
  nn::BatchNorm1d norm = nn::BatchNorm1d(6);
  at::Tensor steps;
};
TORCH_MODULE(Busy);

class CallbackFaults : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { at::set_num_threads(1); }

  struct Run {
    explicit Run(const std::string& kind) {
      torch::manual_seed(3);
      net = Busy(kind);
      inputs = at::randn({7, 4}, at::kDouble);
      targets = at::randn({7, 2}, at::kDouble);
      torch::manual_seed(5);
    }

    void step(bool budget) {
      if (net->is("wrap")) return wrapped_step(budget);
      Options options;
      if (!budget || net->is("checkpoint")) options.micro_batch_size = 3;
      if (budget) options.memory_budget = memory::stats(at::kCPU).live + (int64_t{1} << 20);
      options.match_native_rng = net->is("match");
      options.static_graph = net->is("static");
      if (net->is("checkpoint")) options.checkpoint_segments = 3;
      Loss loss = losses::mse();
      if (net->is("coupled")) {
        loss = losses::coupled([](const Batch& outputs, const Batch& aim) {
          return at::logsumexp(outputs.tensor().mul_(2.0).mm(aim.tensor().t()).flatten(), 0);
        });
      }
      VirtualBatch batch(net, loss, options);
      restarts = batch.backward(inputs, targets).restarts;
    }

    void wrapped_step(bool budget) {
      Options options;
      if (!budget) options.micro_batch_size = 3;
      if (budget) options.memory_budget = memory::stats(at::kCPU).live + (int64_t{1} << 20);
      options.match_native_rng = net->is("match");
      options.static_graph = net->is("static");
      const Wrap wrapped(net, options);
      const at::Tensor outputs = wrapped.forward(inputs).tensor();
      went_forward = true;
      (outputs - targets).square().sum().backward();
      restarts = wrapped.last_report()->restarts;
    }

    std::vector<at::Tensor> state() const {
      std::vector<at::Tensor> all{state_of(at::globalContext().defaultGenerator(at::kCPU))};
      for (const at::Tensor& buffer : net->buffers()) all.push_back(buffer.clone());
      for (const at::Tensor& parameter : net->parameters()) {
        all.push_back(parameter.detach().clone());
        all.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
      }
      return all;
    }

    Busy net = nullptr;
    at::Tensor inputs, targets;
    int64_t restarts = 0;
    bool went_forward = false;  // through a wrapped model, whose backward failed
  };

  /// In sizes that time may have chosen.
  static void expect_close(const std::vector<at::Tensor>& found,
                           const std::vector<at::Tensor>& wanted, double most) {
    ASSERT_EQ(found.size(), wanted.size());
    EXPECT_TRUE(same_bits(found[0], wanted[0])) << "random state";
    for (size_t i = 1; i < found.size(); ++i) {
      ASSERT_EQ(found[i].defined(), wanted[i].defined()) << i;
      if (!found[i].defined()) continue;
      if (most == 0) {
        EXPECT_TRUE(same_bits(found[i], wanted[i])) << i;
      } else {
        EXPECT_TRUE(at::allclose(found[i], wanted[i], most, most)) << i;
      }
    }
  }

  /// Lets each allocation inside of callbacks fail. \returns how many there are
  static int64_t fail_each(bool budget) {
    Run(GetParam()).step(budget);  // what runs for the first time allocates what it keeps
    Run reference(GetParam());
    int64_t count = 0;
    {
      const memory::FailAllocation counting(memory::FailAllocation::kNever,
                                            &CallbackErrors::at_work);
      reference.step(budget);
      count = counting.seen();
    }
    const std::vector<at::Tensor> wanted = reference.state();
    int64_t raised = 0, answered = 0;
    // A plan that begins anew takes its time.
    const int64_t stride = budget ? 1 + count / 16 : 1;
    for (int64_t place = 1; place <= count; place += stride) {
      SCOPED_TRACE("allocation " + std::to_string(place) + " of " + std::to_string(count));
      Run run(GetParam());
      const std::vector<at::Tensor> before = run.state();
      bool failed = false;
      try {
        const memory::FailAllocation failure(place, &CallbackErrors::at_work);
        run.step(budget);
        expect_close(run.state(), wanted, 1e-12);
        answered += run.restarts;
      } catch (const c10::OutOfMemoryError&) {
        failed = true;
      } catch (const Error&) {
        failed = true;
      }
      raised += failed ? 1 : 0;
      if (failed && run.went_forward) {
        for (const at::Tensor& parameter : run.net->parameters()) {
          EXPECT_FALSE(parameter.grad().defined());
        }
      } else if (failed) {
        expect_close(run.state(), before, 0);
        run.step(budget);
        expect_close(run.state(), wanted, 1e-12);
      }
      if (HasFailure()) break;
    }
    EXPECT_GT(budget ? raised + answered : raised, 0);
    return count;
  }
};

TEST_P(CallbackFaults, AFixedSizeRaisesWhatFailsInACallback) {
  EXPECT_GT(fail_each(/*budget=*/false), 0);
}

TEST_P(CallbackFaults, ABudgetAnswersWhatFailsInACallback) {
  EXPECT_GT(fail_each(/*budget=*/true), 0);
}

INSTANTIATE_TEST_SUITE_P(Step, CallbackFaults,
                         ::testing::Values("stream", "coupled", "cut", "checkpoint", "static",
                                           "match", "across", "wrap", "wrap_cut", "wrap_static",
                                           "wrap_match", "wrap_across"),
                         [](const auto& info) { return info.param; });

TEST(FixedOps, WhatFailsInACallbackIsRaised) {
  const auto constant = [](const std::vector<at::Tensor>& x) { return x[0].clone(); };
  const at::Tensor x = at::randn({4, 3}, at::kDouble);
  for (const int64_t place : {1, 2}) {
    coupled::CouplingWatch watch;
    const coupled::CouplingWatch::Scope watching(watch);
    coupled::FixedOps fixed({}, 4, watch, /*backward=*/false);
    {
      const memory::FailAllocation failure(place, &CallbackErrors::at_work);
      across_batch(constant, {x});
      EXPECT_TRUE(failure.failed());  // the mean of each row, what is given for it
    }
    EXPECT_THROW(fixed.strayed(), c10::OutOfMemoryError);
    EXPECT_FALSE(fixed.strayed());
  }
}

TEST(CallbackErrors, KeepsTheFirstAndGivesItOnce) {
  CallbackErrors errors;
  errors.guard([] { EXPECT_TRUE(CallbackErrors::at_work()); });
  EXPECT_FALSE(errors.any());
  EXPECT_NO_THROW(errors.rethrow());
  errors.guard([] { throw Unsupported("first"); });
  errors.guard([] { throw InvalidArgument("second"); });
  EXPECT_FALSE(CallbackErrors::at_work());
  EXPECT_THROW(errors.rethrow(), Unsupported);
  EXPECT_NO_THROW(errors.rethrow());
}

}  // namespace
}  // namespace infinitybatch::testing
