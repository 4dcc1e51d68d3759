#pragma once

#include "execute/problem.hpp"

#include <infinitybatch/core/batch_source.hpp>

#include <string>

namespace infinitybatch {

/// What is known of one batch is known of all of its kind. Computed once a step.
struct BatchKind {
  /// Types and layouts, train or eval, autocast, threads: what samples that differ in length alone
  /// have in common. Memory and time are planned by it and by lengths.
  std::string layout;
  /// The same, the program that forward is set to run, and where samples have a single element,
  /// which does not tell how it lies beside the samples: findings are about it.
  std::string program;
  /// The sizes of each dimension of a sample.
  std::string lengths;

  /// What decides how much memory a way takes.
  std::string shapes() const { return layout + lengths; }
};

/// \param problem with its device, mode and program
BatchKind batch_kind(const Problem& problem, const BatchSource& inputs, const BatchSource& targets);

/// Shapes of samples: of inputs, then of targets.
Dims lengths_of(const BatchSource& inputs, const BatchSource& targets);

}  // namespace infinitybatch
