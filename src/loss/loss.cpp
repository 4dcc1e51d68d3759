#include <infinitybatch/loss/loss.hpp>

#include "loss/one_number.hpp"

#include <infinitybatch/core/errors.hpp>

namespace infinitybatch {
SeparableLoss::SeparableLoss(std::string name, Sum sum, Denominator denominator, Penalty penalty)
    : name_(std::move(name)),
      sum_(std::move(sum)),
      denominator_(std::move(denominator)),
      penalty_(std::move(penalty)) {
  if (!sum_) {
    throw InvalidArgument("the loss '" + name_ + "' has no function for its sum over samples");
  }
}

at::Tensor SeparableLoss::sum(const Batch& outputs, const Batch& targets) const {
  return one_number(sum_(outputs, targets), "the sum of the loss '" + name_ + "'");
}

DenominatorPart SeparableLoss::denominator(const Batch& targets, int64_t samples) const {
  if (!denominator_) return Undivided{};
  DenominatorPart part = denominator_(targets, samples);
  if (at::Tensor* tensor = std::get_if<at::Tensor>(&part)) {
    *tensor = one_number(*tensor, "the denominator of the loss '" + name_ + "'");
  }
  return part;
}

at::Tensor SeparableLoss::penalty() const {
  if (!penalty_) throw StateError("the loss '" + name_ + "' has no penalty; ask has_penalty()");
  return one_number(penalty_(), "the penalty of the loss '" + name_ + "'");
}

SeparableLoss SeparableLoss::with_penalty(Penalty penalty) const {
  if (!penalty) throw InvalidArgument("with_penalty needs a function that returns a tensor");
  SeparableLoss result = *this;
  if (!penalty_) {
    result.penalty_ = std::move(penalty);
  } else {
    result.penalty_ = [first = penalty_, second = std::move(penalty)] {
      return first().add(second());
    };
  }
  return result;
}

namespace losses {

SeparableLoss separable(SeparableLoss::Sum sum, SeparableLoss::Denominator denominator) {
  return {"separable", std::move(sum), std::move(denominator)};
}

}  // namespace losses
}  // namespace infinitybatch
