#pragma once

#include <infinitybatch/core/batch.hpp>

#include <functional>
#include <memory>
#include <string>
#include <variant>

namespace infinitybatch {

/// One micro-batch's part of the global denominator: a number where shapes alone decide it, else a
/// 0-dimensional tensor (kept on its device, so that nothing waits for it).
using DenominatorPart = std::variant<double, at::Tensor>;

/// A loss that is a sum over samples divided by a denominator known from the targets:
///     loss = (sum over micro-batches of `sum(outputs, targets)`) / (sum of `denominator(targets)`)
///            + `penalty()`
class SeparableLoss {
 public:
  /// The sum over this micro-batch's samples; a 0-dimensional tensor that carries gradient.
  using Sum = std::function<at::Tensor(const Batch& outputs, const Batch& targets)>;
  /// This micro-batch's part of the denominator. `samples` is the number of rows.
  using Denominator = std::function<DenominatorPart(const Batch& targets, int64_t samples)>;
  /// A term that depends on parameters only; computed once per logical batch.
  using Penalty = std::function<at::Tensor()>;

  SeparableLoss(std::string name, Sum sum, Denominator denominator, Penalty penalty = nullptr)
      : name_(std::move(name)),
        sum_(std::move(sum)),
        denominator_(std::move(denominator)),
        penalty_(std::move(penalty)) {}

  const std::string& name() const noexcept { return name_; }
  at::Tensor sum(const Batch& outputs, const Batch& targets) const { return sum_(outputs, targets); }
  DenominatorPart denominator(const Batch& targets, int64_t samples) const {
    return denominator_(targets, samples);
  }
  bool has_penalty() const noexcept { return penalty_ != nullptr; }
  at::Tensor penalty() const { return penalty_(); }
  /// The same loss with `penalty` added once per logical batch.
  SeparableLoss with_penalty(Penalty penalty) const;

 private:
  std::string name_;
  Sum sum_;
  Denominator denominator_;
  Penalty penalty_;
};

namespace losses {

/// A loss of the user's own that is separable.
/// \param sum         (outputs, targets) -> 0-dimensional sum over the rows given
/// \param denominator (targets, rows) -> their part of the denominator
SeparableLoss separable(SeparableLoss::Sum sum, SeparableLoss::Denominator denominator);

}  // namespace losses
}  // namespace infinitybatch
