// One step through the installed headers: the gradient of 1,000 samples inside 256 KiB is the
// native one, and the budget that native breaks is kept.
#include <infinitybatch/core/bytes.hpp>
#include <infinitybatch/infinitybatch.hpp>

#include <ATen/ATen.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <cstdio>

namespace ib = infinitybatch;

int main() {
  at::manual_seed(7);
  torch::nn::Sequential model(torch::nn::Linear(16, 32), torch::nn::ReLU(),
                              torch::nn::Linear(32, 5));
  model->to(at::kDouble);
  const auto inputs = at::randn({1000, 16}, at::kDouble);
  const auto labels = at::randint(5, {1000}, at::kLong);

  torch::nn::functional::cross_entropy(model->forward(inputs), labels).backward();
  std::vector<at::Tensor> native;
  for (auto& parameter : model->parameters()) {
    native.push_back(parameter.grad().clone());
    parameter.mutable_grad().reset();
  }

  const int64_t budget = ib::parse_bytes("256KiB");
  ib::VirtualBatch batch(model, ib::losses::cross_entropy(), {.memory_budget = budget});
  const ib::StepReport report = batch.backward(inputs, labels);

  double worst = 0;
  for (size_t i = 0; i < native.size(); ++i) {
    const auto difference = model->parameters()[i].grad() - native[i];
    worst = std::max(worst, (difference.norm() / native[i].norm()).item<double>());
  }
  std::printf("%zu micro-batches, worst relative error %.1e, peak %s of %s\n",
              report.micro_batch_sizes.size(), worst, ib::format_bytes(report.peak_bytes).c_str(),
              ib::format_bytes(budget).c_str());
  if (worst > 1e-12) return 1;
  if (report.peak_bytes > budget || report.peak_bytes <= 0) return 2;
  if (report.micro_batch_sizes.size() < 2) return 3;

  // The budget is enforced: the same batch at once does not fit.
  try {
    const ib::memory::Limit limit(budget);
    torch::nn::functional::cross_entropy(model->forward(inputs), labels).backward();
  } catch (const c10::OutOfMemoryError&) {
    return 0;
  }
  return 4;
}
