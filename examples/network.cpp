// A network of your own for the command line, which trains it as its own:
//   infinitybatch train --model build/release/lib/libnetwork.so --data digits
#include <infinitybatch/command_line/network.hpp>

#include <torch/nn/modules/linear.h>

namespace ib = infinitybatch;

class Net final : public ib::command_line::Network {
 public:
  explicit Net(const ib::command_line::Samples& samples) {
    int64_t features = 1;
    for (int64_t size : samples.shape) features *= size;
    const int64_t width = samples.width > 0 ? samples.width : 64;
    hidden_ = register_module("hidden", torch::nn::Linear(features, width));
    last_ = register_module("last", torch::nn::Linear(width, samples.classes));
  }

  at::Tensor forward(const at::Tensor& inputs) override {
    return last_(torch::relu(hidden_(inputs.flatten(1))));
  }

 private:
  torch::nn::Linear hidden_{nullptr};
  torch::nn::Linear last_{nullptr};
};

INFINITYBATCH_NETWORK(Net)
