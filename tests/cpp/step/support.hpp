#pragma once

#include <infinitybatch/core/bytes.hpp>
#include <infinitybatch/infinitybatch.hpp>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <thread>
#include <vector>

namespace infinitybatch::testing {

namespace nn = torch::nn;

inline Options of_size(int64_t micro_batch_size) {
  Options options;
  options.micro_batch_size = micro_batch_size;
  return options;
}

/// A network and a regression task in float64.
struct Task {
  explicit Task(int64_t samples = 7, int64_t width = 5) {
    torch::manual_seed(3);
    net = nn::Sequential(nn::Linear(4, width), nn::Tanh(), nn::Linear(width, 2));
    net->to(at::kDouble);
    inputs = at::randn({samples, 4}, at::kDouble);
    targets = at::randn({samples, 2}, at::kDouble);
  }
  at::Tensor native_loss() { return at::mse_loss(net->forward(inputs), targets); }
  /// What native adds to `.grad`, without touching it.
  std::vector<at::Tensor> native_gradients() {
    return torch::autograd::grad({native_loss()}, net->parameters());
  }

  nn::Sequential net = nullptr;
  at::Tensor inputs, targets;
};

/// Norm of the difference over norm of the reference.
inline double error(const at::Tensor& value, const at::Tensor& reference) {
  if (!value.defined() || !reference.defined()) return INFINITY;
  const at::Tensor a = value.to(at::kDouble), b = reference.to(at::kDouble);
  const double difference = (a - b).norm().item<double>();
  return difference == 0 ? 0 : difference / b.norm().item<double>();
}

/// `.grad` of every parameter against `expected`.
inline void expect_gradients(const nn::Module& net, const std::vector<at::Tensor>& expected) {
  const auto named = net.named_parameters();
  ASSERT_EQ(named.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_LE(error(named[i].value().grad(), expected[i]), 1e-12) << named[i].key();
  }
}

template <typename Exception, typename Call>
std::string message_of(Call call) {
  try {
    call();
  } catch (const Exception& error) {
    return error.what_without_backtrace();
  }
  ADD_FAILURE() << "nothing of the right type was thrown";
  return "";
}

inline void expect_says(const std::string& message, const std::string& part) {
  EXPECT_NE(message.find(part), std::string::npos) << "'" << part << "' is not in: " << message;
}

}  // namespace infinitybatch::testing
