#pragma once

#include "loss/binary_cases.hpp"
#include "loss/classification_cases.hpp"
#include "loss/criterion_case.hpp"
#include "loss/distance_cases.hpp"
#include "loss/regression_cases.hpp"
#include "loss/sequence_cases.hpp"

namespace infinitybatch::testing {

/// Every separable criterion in every hard case. A new criterion is a new row in the header of its
/// kind; the loss tests and the exactness suite read the same table.
///
///     for (const CriterionCase& criterion : criterion_cases()) {
///       Draw draw(samples, options, /*seed=*/1);
///       const Batch targets = criterion.targets(draw);
///       const Batch outputs = criterion.head(model(inputs));      // model gives (N, features)
///       const at::Tensor loss = criterion.native(outputs.tensors(), targets.tensors());
///       const SeparableLoss ours = criterion.loss(options);
///     }
inline const std::vector<CriterionCase>& criterion_cases() {
  static const std::vector<CriterionCase> cases = [] {
    std::vector<CriterionCase> rows;
    add_classification_cases(rows);
    add_binary_cases(rows);
    add_regression_cases(rows);
    add_distance_cases(rows);
    add_sequence_cases(rows);
    return rows;
  }();
  return cases;
}

/// For gtest: the row's name with characters that it allows.
inline std::string test_name(const CriterionCase& criterion) {
  std::string name = criterion.name;
  for (char& letter : name) {
    if (!std::isalnum(static_cast<unsigned char>(letter))) letter = '_';
  }
  return name;
}

}  // namespace infinitybatch::testing
