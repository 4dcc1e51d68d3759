#pragma once

#include <infinitybatch/infinitybatch.hpp>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

// A small world around one step, with everything in it that a step may disturb, for fault tests.
namespace infinitybatch::testing {

/// What the n-th place at which user code runs throws.
struct Tripped : std::runtime_error {
  Tripped() : std::runtime_error("tripped on purpose") {}
};

/// Counts the places at which user code runs, in forward, loss, backward, hooks and callbacks;
/// throws at the n-th.
class Tripwires {
 public:
  static constexpr int64_t kNever = INT64_MAX;
  explicit Tripwires(int64_t fatal) : outer_(innermost) {
    fatal_ = fatal;
    innermost = this;
  }
  ~Tripwires() { innermost = outer_; }
  Tripwires(const Tripwires&) = delete;
  Tripwires& operator=(const Tripwires&) = delete;

  int64_t seen() const { return seen_; }
  static void pass();

 private:
  static thread_local Tripwires* innermost;
  Tripwires* outer_;
  int64_t fatal_ = kNever;
  int64_t seen_ = 0;
};

/// The identity, with a tripwire in forward and one in backward.
at::Tensor tripwire(const at::Tensor& x);

/// `dropout` draws masks. `harmless` draws as many numbers for any split and uses none, so that
/// gradients can be compared with native's.
enum class Randomness { dropout, harmless };

class World {
 public:
  /// \param kind one of `kinds()`
  World(const std::string& kind, Randomness randomness);
  ~World();
  static const std::vector<std::string>& kinds();
  static constexpr int64_t kSamples = 9;

  Model model() const;
  SeparableLoss loss() const;
  /// Options whose callbacks are tripwires.
  Options options() const;
  BatchSource inputs() const;
  BatchSource targets() const;
  /// Adds native's gradient of the whole batch to `.grad`; returns the loss.
  at::Tensor native();

  /// Parameters and the loss's own leaf.
  std::vector<NamedParameter> leaves() const;
  std::vector<at::Tensor> buffers() const;

 private:
  struct Net;
  std::shared_ptr<Net> net_;
  at::Tensor temperature_;
  Batch inputs_, targets_;
};

/// Bit for bit; two undefined tensors are equal.
bool same_bits(const at::Tensor& a, const at::Tensor& b);

/// What a step must leave alone when it fails.
class Snapshot {
 public:
  explicit Snapshot(const World& world);
  /// Contract 3: objects and values of `.grad`, parameters, buffers, random state, live bytes.
  void expect_unchanged() const;

 private:
  struct Tensor {
    std::string name;
    at::Tensor object, values;
  };
  const World& world_;
  std::vector<Tensor> gradients_, parameters_, buffers_;
  at::Tensor random_;
  int64_t live_ = 0;
};

/// What a step leaves behind.
struct Outcome {
  Outcome(const World& world, const at::Tensor& loss);
  std::vector<NamedParameter> gradients, buffers;
  at::Tensor random, loss;
};
void expect_same_bits(const Outcome& a, const Outcome& b);
/// Gradients and loss within 1e-12, buffers and random state bit for bit.
void expect_exact(const Outcome& ours, const Outcome& native);

/// All of 1 to `count`, or a seeded sample of about 150 with both ends in it;
/// INFINITYBATCH_LONG_TESTS asks for all.
std::vector<int64_t> places(int64_t count);

}  // namespace infinitybatch::testing
