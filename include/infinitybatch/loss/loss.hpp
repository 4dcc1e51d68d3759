#pragma once

#include <infinitybatch/core/batch.hpp>

#include <functional>
#include <string>
#include <utility>
#include <variant>

namespace infinitybatch {

/// What `denominator` returns where the loss is its sum (reduction 'sum'): nothing is divided. All
/// micro-batches of such a loss return it.
struct Undivided {};

/// One micro-batch's part of the global denominator: a number where shapes alone decide it, else a
/// 0-dimensional tensor (kept on its device, so that nothing waits for it), or `Undivided`.
using DenominatorPart = std::variant<double, at::Tensor, Undivided>;

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

  /// \param denominator nothing where the loss is the sum itself
  /// \throws InvalidArgument where `sum` is nothing
  SeparableLoss(std::string name, Sum sum, Denominator denominator, Penalty penalty = nullptr);

  /// torch's functional name for the ready-made ones: "cross_entropy", "mse_loss".
  const std::string& name() const noexcept { return name_; }
  /// \throws InvalidArgument where the function gives more than one number
  at::Tensor sum(const Batch& outputs, const Batch& targets) const;
  DenominatorPart denominator(const Batch& targets, int64_t samples) const;
  bool has_penalty() const noexcept { return penalty_ != nullptr; }
  at::Tensor penalty() const;
  /// The same loss with `penalty` added once per logical batch, beside any that is there already.
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
/// \param denominator (targets, rows) -> their part of the denominator; nothing where the loss is
///                    the sum itself
SeparableLoss separable(SeparableLoss::Sum sum, SeparableLoss::Denominator denominator);

}  // namespace losses
}  // namespace infinitybatch
