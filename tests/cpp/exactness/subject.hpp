#pragma once

#include "exactness/family.hpp"

#include <ATen/autocast_mode.h>

#include <vector>

namespace infinitybatch::testing {

/// A family's model with a criterion's head on it, which counts its forwards.
class Subject : public torch::nn::Module {
 public:
  Subject(const Family& family, const CriterionCase& criterion);

  Batch forward(const Batch& inputs);

  /// Rows of each forward since the last call.
  std::vector<int64_t> take_forwards() { return std::exchange(forwards_, {}); }
  /// Whether an output since the last call had more than one dimension as long as there were rows:
  /// one forward does not tell then which of them follows the samples.
  bool take_ambiguity() { return std::exchange(ambiguous_, false); }
  void drop_gradients();

 private:
  std::shared_ptr<FamilyModule> module_;
  std::function<Batch(const at::Tensor& features)> head_;
  std::vector<int64_t> forwards_;
  bool ambiguous_ = false;
};

/// Parameters and buffers to `type`, complex ones to its complex type; the tensor objects stay.
void cast(torch::nn::Module& module, at::ScalarType type);

/// A subject with parameters drawn from `seed` in float32, whatever its type: float32 and float64
/// have the same numbers.
std::shared_ptr<Subject> make_subject(const Family& family, const CriterionCase& criterion,
                                      at::ScalarType type, uint64_t seed);

struct Data {
  Batch inputs, targets;
};

/// Inputs and targets with float32 numbers in `type`.
Data make_data(const Family& family, const CriterionCase& criterion, int64_t samples,
               at::ScalarType type, uint64_t seed);

/// The same samples in the opposite order.
Data reversed(const Data& data);

/// Sample `order[i]` of `data` in place i; `order` may leave samples out and take them twice.
Data ordered(const Data& data, const std::vector<int64_t>& order);

/// Samples begin to end.
Data part(const Data& data, int64_t begin, int64_t end);

/// The leaves of consecutive parts joined, each along its own batch dimension.
Batch joined(const std::vector<Batch>& parts);

/// bf16 autocast while it lives, where wanted.
class MaybeAutocast {
 public:
  explicit MaybeAutocast(bool wanted) : wanted_(wanted) {
    if (!wanted_) return;
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  }
  ~MaybeAutocast() {
    if (!wanted_) return;
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::clear_cache();
  }
  MaybeAutocast(const MaybeAutocast&) = delete;
  MaybeAutocast& operator=(const MaybeAutocast&) = delete;

 private:
  bool wanted_;
};

}  // namespace infinitybatch::testing
