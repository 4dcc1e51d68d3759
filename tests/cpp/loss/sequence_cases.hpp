#pragma once

#include "loss/criterion_case.hpp"

namespace infinitybatch::testing {

inline constexpr int64_t kSteps = 7, kSymbols = 4, kLongest = 3;

/// (n, T·C) -> (T, n, C): the batch is dimension 1.
inline Batch ctc_log_probabilities(const at::Tensor& features) {
  return Batch(
             features.reshape({features.size(0), kSteps, kSymbols}).log_softmax(2).transpose(0, 1))
      .with_batch_dim(1);
}

struct CTCCase {
  const char* name;
  int64_t shortest_input;   // lengths are drawn from here to T
  int64_t shortest_target;  // and from here to S
  bool zero_infinity = false;
  bool finite = true;
  bool lengths_from_model = false;
};

inline void add_ctc_case(std::vector<CriterionCase>& cases, const CTCCase& row, Reduction r) {
  CriterionCase result;
  result.name = std::string("ctc_loss/") + row.name + suffix(r);
  result.features = kSteps * kSymbols;
  result.finite = row.finite;
  result.head = [row](const at::Tensor& features) {
    const Batch log_probs = ctc_log_probabilities(features);
    if (!row.lengths_from_model) return log_probs;
    // Lengths that depend on the sample, as a subsampling encoder gives them.
    const at::Tensor lengths = features.detach().select(1, 0).gt(0).to(at::kLong).add(kSteps - 1);
    return Batch::tuple({log_probs, lengths});
  };
  result.targets = [row](Draw& draw) {
    const at::Tensor labels = draw.integers(1, kSymbols, {kLongest});
    const at::Tensor inputs = draw.integers(row.shortest_input, kSteps + 1, {});
    at::Tensor targets = draw.integers(row.shortest_target, kLongest + 1, {});
    targets.slice(0, 0, 1).fill_(row.shortest_target);  // the hard one is there for any N
    if (row.lengths_from_model) return Batch::tuple({labels, targets});
    inputs.slice(0, 0, 1).fill_(row.shortest_input);
    return Batch::tuple({labels, inputs, targets});
  };
  result.native = [row, r](const Tensors& o, const Tensors& t) {
    const bool model = row.lengths_from_model;
    return F::ctc_loss(o[0], t[0], model ? o[1] : t[1], model ? t[1] : t[2],
                       with_reduction(F::CTCLossFuncOptions().zero_infinity(row.zero_infinity), r));
  };
  result.loss = [row, r](const at::TensorOptions&) {
    return losses::ctc({0, row.zero_infinity, r});
  };
  cases.push_back(std::move(result));
}

inline void add_sequence_cases(std::vector<CriterionCase>& cases) {
  for (Reduction r : kMeanAndSum) {
    add_ctc_case(cases, {"ragged", 6, 1}, r);
    add_ctc_case(cases, {"empty_targets", 6, 0}, r);
    add_ctc_case(cases, {"lengths_from_model", 6, 1, false, true, true}, r);
    // One step for three labels cannot be aligned: an infinite loss.
    add_ctc_case(cases, {"infeasible_zeroed", 1, kLongest, true}, r);
    add_ctc_case(cases, {"infeasible", 1, kLongest, false, false}, r);
  }
}

}  // namespace infinitybatch::testing
