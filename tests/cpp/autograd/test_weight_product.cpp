// Gradients of weights that are products of two matrices: added to their sums as they are computed.
#include "autograd/engine.hpp"
#include "autograd/gradient_sinks.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/memory/statistics.hpp>

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

namespace infinitybatch::autograd {
namespace {

using Forward = std::function<at::Tensor(const at::Tensor& rows, const at::Tensor& weight)>;

constexpr int64_t kIn = 48, kOut = 80;

at::Tensor weight_of(std::vector<int64_t> shape) {
  return at::randn(shape, at::kDouble).requires_grad_();
}

struct Found {
  at::Tensor gradient;
  int products = 0;
  int others = 0;
};

/// Three micro-batches through sinks.
Found through_sinks(const at::Tensor& weight, const std::vector<at::Tensor>& parts,
                    const Forward& forward, bool once = true) {
  Found found;
  GradientSinks sinks({{"weight", weight}});
  sinks.watch([&](const SinkEvent& event) { ++(event.product ? found.products : found.others); });
  for (const at::Tensor& rows : parts) {
    const at::Tensor root = forward(rows, weight);
    sinks.redirect_other_leaves({root}, {}, once);
    run_backward({root}, {at::ones_like(root)});
  }
  sinks.watch(nullptr);
  found.gradient = sinks.take()[0];
  return found;
}

at::Tensor native(const at::Tensor& weight, const std::vector<at::Tensor>& parts,
                  const Forward& forward) {
  at::Tensor sum;
  for (const at::Tensor& rows : parts) {
    const at::Tensor part = torch::autograd::grad({forward(rows, weight).sum()}, {weight})[0];
    sum = sum.defined() ? sum + part : part;
  }
  return sum;
}

std::vector<at::Tensor> parts_of(std::vector<int64_t> shape) {
  std::vector<at::Tensor> parts;
  for (int64_t rows = 3; rows < 6; ++rows) {
    shape[0] = rows;
    parts.push_back(at::randn(shape, at::kDouble));
  }
  return parts;
}

at::Tensor tanh_of_linear(const at::Tensor& rows, const at::Tensor& weight) {
  return at::tanh(at::linear(rows, weight, at::ones({kOut}, at::kDouble))).sum();
}

TEST(WeightProducts, AreAddedAsTheyAreComputed) {
  const struct {
    const char* what;
    std::vector<int64_t> rows, weight;
    Forward forward;
  } cases[] = {
      {"linear", {0, kIn}, {kOut, kIn}, tanh_of_linear},
      {"linear over a sequence", {0, 7, kIn}, {kOut, kIn}, tanh_of_linear},
      {"linear without bias",
       {0, kIn},
       {kOut, kIn},
       [](const at::Tensor& x, const at::Tensor& w) { return at::linear(x, w).tanh().sum(); }},
      {"a product",
       {0, kIn},
       {kIn, kOut},
       [](const at::Tensor& x, const at::Tensor& w) { return x.mm(w).tanh().sum(); }},
      {"a product and a bias",
       {0, kIn},
       {kIn, kOut},
       [](const at::Tensor& x, const at::Tensor& w) {
         return at::addmm(at::ones({kOut}, at::kDouble), x, w, /*beta=*/3).tanh().sum();
       }},
      {"a gradient that is expanded",
       {0, kIn},
       {kOut, kIn},
       [](const at::Tensor& x, const at::Tensor& w) { return at::linear(x, w).sum(); }},
  };
  for (const auto& each : cases) {
    const at::Tensor weight = weight_of(each.weight);
    const std::vector<at::Tensor> parts = parts_of(each.rows);
    const Found found = through_sinks(weight, parts, each.forward);
    EXPECT_EQ(found.products, 3) << each.what;
    EXPECT_EQ(found.others, 0) << each.what;
    EXPECT_TRUE(found.gradient.allclose(native(weight, parts, each.forward), 1e-13, 1e-13))
        << each.what;
    EXPECT_TRUE(found.gradient.is_contiguous()) << each.what;
  }
}

TEST(WeightProducts, OfOneWeightInSeveralPlacesAddUp) {
  const at::Tensor weight = weight_of({kIn, kIn});
  const auto forward = [](const at::Tensor& x, const at::Tensor& w) {
    return (at::linear(at::linear(x, w).tanh(), w) + w.sum(0)).tanh().sum();
  };
  const std::vector<at::Tensor> parts = parts_of({0, kIn});
  const Found found = through_sinks(weight, parts, forward);
  EXPECT_EQ(found.products, 6);
  EXPECT_EQ(found.others, 3);
  EXPECT_TRUE(found.gradient.allclose(native(weight, parts, forward), 1e-12, 1e-12));
}

TEST(WeightProducts, TakeNoMemory) {
  const at::Tensor weight = weight_of({512, 512});
  const at::Tensor rows = at::randn({2, 512}, at::kDouble);
  for (const bool once : {false, true}) {
    GradientSinks sinks({{"weight", weight}});
    const auto run = [&] {
      const at::Tensor root = at::linear(rows, weight).sum();
      sinks.redirect_other_leaves({root}, {}, once);
      run_backward({root}, {at::ones_like(root)});
    };
    run();  // makes the buffer
    const int64_t before = memory::stats(at::kCPU).live;
    memory::reset_peak(at::kCPU);
    run();
    const int64_t risen = memory::stats(at::kCPU).peak - before;
    const int64_t bytes = weight.numel() * 8;
    EXPECT_EQ(risen < bytes / 4, once) << risen;
  }
}

TEST(WeightProducts, StayGradientsWhereSomethingElseIsAsked) {
  const at::Tensor weight = weight_of({kOut, kIn});
  const std::vector<at::Tensor> parts = parts_of({0, kIn});
  int seen = 0;
  class Count : public torch::autograd::FunctionPostHook {
   public:
    explicit Count(int& count) : count_(count) {}
    torch::autograd::variable_list operator()(
        const torch::autograd::variable_list& of_inputs,
        const torch::autograd::variable_list& /*of_outputs*/) override {
      ++count_;
      return of_inputs;
    }

   private:
    int& count_;
  };
  const Forward cases[] = {
      [&](const at::Tensor& x, const at::Tensor& w) {  // somebody watches the transposed weight
        const at::Tensor transposed = w.t();
        transposed.register_hook([&](const at::Tensor&) { ++seen; });
        return x.mm(transposed).tanh().sum();
      },
      [&](const at::Tensor& x, const at::Tensor& w) {  // or the node
        const at::Tensor y = at::linear(x, w);
        y.grad_fn()->add_post_hook(std::make_unique<Count>(seen));
        return y.tanh().sum();
      },
      [](const at::Tensor& x, const at::Tensor& w) {  // a factor
        return at::addmm(at::ones({kOut}, at::kDouble), x, w.t(), 1, /*alpha=*/2).tanh().sum();
      },
      [](const at::Tensor& x, const at::Tensor& w) {  // the weight is on the left
        return w.mm(x.t()).tanh().sum();
      },
      [](const at::Tensor& x, const at::Tensor& w) {  // what is multiplied was made of the weight
        return at::linear(x, w * 2).tanh().sum();
      },
  };
  for (const Forward& forward : cases) {
    const Found found = through_sinks(weight, parts, forward);
    EXPECT_EQ(found.products, 0);
    EXPECT_EQ(found.others, 3);
    EXPECT_TRUE(found.gradient.allclose(native(weight, parts, forward), 1e-13, 1e-13));
  }
  EXPECT_EQ(seen, 2 * 2 * 3) << "native's runs too";
  EXPECT_EQ(through_sinks(weight, parts, tanh_of_linear, /*once=*/false).products, 0);
}

TEST(WeightProducts, SeeWhatHooksOnOutputsMakeOfTheirGradient) {
  const at::Tensor weight = weight_of({kOut, kIn});
  const std::vector<at::Tensor> parts = parts_of({0, kIn});
  const auto forward = [](const at::Tensor& x, const at::Tensor& w) {
    const at::Tensor y = at::linear(x, w);
    y.register_hook([](const at::Tensor& gradient) { return gradient * 2; });
    return y.tanh().sum();
  };
  const Found found = through_sinks(weight, parts, forward);
  EXPECT_EQ(found.products, 3);
  EXPECT_TRUE(found.gradient.allclose(native(weight, parts, forward), 1e-13, 1e-13));
}

TEST(WeightProducts, StayGradientsOfHalfPrecision) {
  const at::Tensor weight = at::randn({kOut, kIn}).to(at::kBFloat16).requires_grad_();
  const std::vector<at::Tensor> parts = {at::randn({3, kIn}).to(at::kBFloat16)};
  const auto forward = [](const at::Tensor& x, const at::Tensor& w) {
    return at::linear(x, w).sum();
  };
  EXPECT_EQ(through_sinks(weight, parts, forward).products, 0);
}

TEST(WeightProducts, OfAGraphThatOutlivedItsStepAreRefused) {
  const at::Tensor weight = weight_of({kOut, kIn});
  at::Tensor kept;
  {
    GradientSinks sinks({{"weight", weight}});
    kept = at::linear(at::ones({2, kIn}, at::kDouble), weight).sum();
    sinks.redirect_other_leaves({kept}, {}, /*once=*/true);
  }
  EXPECT_THROW(run_backward({kept}, {at::ones_like(kept)}), StateError);
  EXPECT_FALSE(weight.grad().defined());
}

TEST(WeightProducts, OfRowsThatWereChangedInPlaceAreRefused) {
  const at::Tensor weight = weight_of({kOut, kIn});
  GradientSinks sinks({{"weight", weight}});
  const at::Tensor rows = at::ones({2, kIn}, at::kDouble);
  const at::Tensor root = at::linear(rows, weight).sum();
  sinks.redirect_other_leaves({root}, {}, /*once=*/true);
  rows.add_(1);
  EXPECT_ANY_THROW(run_backward({root}, {at::ones_like(root)}));
}

}  // namespace
}  // namespace infinitybatch::autograd
