#pragma once

#include "loss/criterion_case.hpp"

#include <memory>
#include <string>
#include <vector>

namespace infinitybatch::testing {

/// A model of some family, with an output that every criterion's head can use.
class FamilyModule : public torch::nn::Module {
 public:
  /// One micro-batch of inputs -> (n, features), each sample for itself.
  virtual at::Tensor features(const Batch& inputs) = 0;
};

/// A kind of model: how to make one and how to feed it. A new family is a class of a dozen lines
/// and a row in one of the tables below.
struct Family {
  std::string name;
  /// Draws parameters in float32 from torch's generator.
  std::function<std::shared_ptr<FamilyModule>(int64_t features)> make;
  std::function<Batch(Draw& draw)> inputs;
  bool autocast = false;  ///< forward and loss run under bf16 autocast; float32 only
};

template <typename Module>
Family family(std::string name, std::function<Batch(Draw& draw)> inputs) {
  return {std::move(name),
          [](int64_t features) -> std::shared_ptr<FamilyModule> {
            return std::make_shared<Module>(features);
          },
          std::move(inputs)};
}

/// Inputs of one tensor (N, shape...) of normal numbers.
inline std::function<Batch(Draw& draw)> normal_inputs(std::vector<int64_t> shape) {
  return [shape](Draw& draw) { return Batch(draw.normal(shape)); };
}

/// Inputs of one tensor (N, shape...) of integers below `words`.
inline std::function<Batch(Draw& draw)> word_inputs(int64_t words, std::vector<int64_t> shape) {
  return [words, shape](Draw& draw) { return Batch(draw.integers(0, words, shape)); };
}

std::vector<Family> vision_families();
std::vector<Family> sequence_families();
std::vector<Family> odd_families();

/// All of them, made once.
const std::vector<Family>& families();

/// \throws std::out_of_range for a name that is none
const Family& family_named(const std::string& name);

}  // namespace infinitybatch::testing
