#include "train/optimizer.hpp"

#include "errors.hpp"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <map>
#include <utility>

namespace infinitybatch::app {
namespace {

using torch::optim::Optimizer;
using Parameters = std::vector<at::Tensor>;

struct Entry {
  double lr;  ///< default
  std::function<std::unique_ptr<Optimizer>(Parameters, double lr)> make;
};

constexpr double kMomentum = 0.9;

const std::map<std::string, Entry>& entries() {
  namespace optim = torch::optim;
  static const std::map<std::string, Entry> all = {
      {"sgd",
       {0.05,
        [](Parameters p, double lr) -> std::unique_ptr<Optimizer> {
          return std::make_unique<optim::SGD>(std::move(p),
                                              optim::SGDOptions(lr).momentum(kMomentum));
        }}},
      {"adam",
       {0.003,
        [](Parameters p, double lr) -> std::unique_ptr<Optimizer> {
          return std::make_unique<optim::Adam>(std::move(p), optim::AdamOptions(lr));
        }}},
      {"adamw",
       {0.003,
        [](Parameters p, double lr) -> std::unique_ptr<Optimizer> {
          return std::make_unique<optim::AdamW>(std::move(p), optim::AdamWOptions(lr));
        }}},
      {"rmsprop",
       {0.001,
        [](Parameters p, double lr) -> std::unique_ptr<Optimizer> {
          return std::make_unique<optim::RMSprop>(std::move(p), optim::RMSpropOptions(lr));
        }}},
      {"adagrad",
       {0.01,
        [](Parameters p, double lr) -> std::unique_ptr<Optimizer> {
          return std::make_unique<optim::Adagrad>(std::move(p), optim::AdagradOptions(lr));
        }}},
  };
  return all;
}

const Entry& entry(const std::string& name) {
  if (name == "lbfgs") {
    throw UsageError(
        "--optimizer lbfgs asks for the loss several times a step, where one logical batch gives "
        "one gradient; use sgd, adam, adamw, rmsprop or adagrad");
  }
  const auto found = entries().find(name);
  if (found == entries().end()) {
    throw UsageError("--optimizer " + name +
                     " is not known; use sgd, adam, adamw, rmsprop or adagrad");
  }
  return found->second;
}

}  // namespace

double default_lr(const std::string& name) {
  return entry(name).lr;
}

std::unique_ptr<torch::optim::Optimizer> make_optimizer(const OptimizerOptions& options,
                                                        std::vector<at::Tensor> parameters) {
  const Entry& chosen = entry(options.name);
  return chosen.make(std::move(parameters), options.lr.value_or(chosen.lr));
}

}  // namespace infinitybatch::app
