#pragma once

#include "autograd/gradient_sinks.hpp"
#include "execute/denominator.hpp"
#include "execute/fewest_rows.hpp"
#include "execute/problem.hpp"

#include <optional>
#include <vector>

namespace infinitybatch {

struct Findings;

/// A separable loss, micro-batch by micro-batch: its sum over these rows divided by the denominator
/// of all.
class SeparableShare {
 public:
  SeparableShare(const Problem& problem, const Findings& findings, autograd::GradientSinks& sinks)
      : problem_(problem), findings_(findings), sinks_(sinks), denominator_(problem) {}

  /// With `Problem::keep_outputs` the outputs are kept, detached.
  /// \return the share at work
  /// \throws CouplingError where the loss draws random numbers for these rows alone, with
  /// `Problem::match_native_rng`
  const at::Tensor& compute(Rows rows, const Batch& outputs, const Batch& targets);
  /// Runs the share at work backward. \param except leaves whose gradients do not belong to the
  /// sinks
  void differentiate(const std::vector<at::Tensor>& except = {}) { differentiate(share_, except); }
  /// The loss's penalty, run backward; undefined where it has none.
  at::Tensor penalty();
  /// Lets go of the share at work.
  void free() { share_.reset(); }
  /// All outputs in order, with `Problem::keep_outputs`.
  Batch take_outputs();

  /// Whether a loss of micro-batches fails on a few samples.
  FewestRows& few() noexcept { return few_; }
  const FewestRows& few() const noexcept { return few_; }

 private:
  at::Tensor sum(Rows rows, const Batch& outputs, const Batch& targets) const;
  void differentiate(const at::Tensor& share, const std::vector<at::Tensor>& except);

  const Problem& problem_;
  const Findings& findings_;
  autograd::GradientSinks& sinks_;
  Denominator denominator_;
  FewestRows few_;
  at::Tensor share_;
  std::vector<Batch> kept_;
  std::vector<int64_t> kept_rows_;
};

}  // namespace infinitybatch
