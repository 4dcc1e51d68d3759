#pragma once

#include "execute/problem.hpp"

namespace infinitybatch {

/// The denominator of the whole logical batch, summed over all targets before the first forward.
class Denominator {
 public:
  explicit Denominator(const Problem& problem);

  /// `sum` divided by the denominator, in the sum's own type; carries gradient.
  at::Tensor divide(const at::Tensor& sum) const;

 private:
  double known_ = 0;  // what shapes alone decide, and on the host everything
  bool undivided_ = false;
  at::Tensor computed_;         // what depends on values of a device; stays there
  mutable at::Tensor divisor_;  // the same in the type of the last sum
};

}  // namespace infinitybatch
