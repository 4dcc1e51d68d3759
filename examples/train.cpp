#include <torch/torch.h>
#include <infinitybatch/infinitybatch.hpp>

#include <iostream>

namespace ib = infinitybatch;

int main() {
  torch::nn::Sequential model(torch::nn::Linear(784, 1024), torch::nn::ReLU(),
                              torch::nn::Linear(1024, 10));
  torch::optim::Adam optimizer(model->parameters());
  ib::VirtualBatch batch(model, ib::losses::cross_entropy(), {.memory_budget = "64MiB"});

  const auto images = torch::randn({10000, 784}), labels = torch::randint(10, {10000});
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    const ib::StepReport report = batch.backward(images, labels);  // exact gradients now in .grad()
    optimizer.step();
    std::cout << "loss " << report.loss.item<float>() << ", peak " << report.peak_bytes
              << " bytes\n";
  }
}
