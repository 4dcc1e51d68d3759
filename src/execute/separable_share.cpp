#include "execute/separable_share.hpp"

#include "autograd/engine.hpp"
#include "core/batch_form.hpp"
#include "core/collectives.hpp"
#include "core/plain_leaves.hpp"
#include "coupled/random_streams.hpp"
#include "coupled/row_errors.hpp"
#include "execute/findings.hpp"
#include "execute/output_law.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Functions.h>

#include <exception>
#include <utility>

namespace infinitybatch {

at::Tensor SeparableShare::sum(Rows rows, const Batch& outputs, const Batch& targets) const {
  if (rows.size() == problem_.batch_size()) return problem_.loss.separable()->sum(outputs, targets);
  at::Tensor sum;
  const auto compute = [&] {
    without_collectives(
        "the loss",
        "for each micro-batch, and other ranks need not split their samples alike; give it as "
        "ib.losses.coupled(loss), which is computed once for all of them",
        [&] { sum = problem_.loss.separable()->sum(outputs, targets); });
  };
  if (!problem_.match_native_rng) {
    compute();
    return sum;
  }
  const coupled::RandomStreams here(devices_of(problem_));
  compute();
  if (!here.untouched()) {
    throw CouplingError("loss",
                        "the loss draws random numbers for each micro-batch, so match_native_rng "
                        "does not know those of the whole batch; draw them before the step, or use "
                        "a coupled loss, which is computed once");
  }
  return sum;
}

const at::Tensor& SeparableShare::compute(Rows rows, const Batch& outputs, const Batch& targets) {
  try {
    few_.watch(rows.size(), [&] { share_ = denominator_.divide(sum(rows, outputs, targets)); });
  } catch (...) {
    if (rows.size() < problem_.batch_size() && coupled::may_be_of_rows(std::current_exception())) {
      explain_compared(outputs, targets, rows.size(), problem_.batch_size());
    }
    throw;
  }
  if (problem_.keep_outputs) {
    kept_.push_back(without_graph(outputs));
    kept_rows_.push_back(rows.size());
  }
  return share_;
}

void SeparableShare::differentiate(const at::Tensor& share, const std::vector<at::Tensor>& except) {
  if (!share.requires_grad()) {
    throw InvalidArgument(
        "the loss does not depend on anything that requires grad; check that the model's "
        "parameters "
        "require grad and that its outputs are not detached");
  }
  sinks_.redirect_other_leaves({share}, except, /*once=*/true);
  at::Tensor gradient =
      problem_.loss_scale.defined()
          ? problem_.loss_scale.to(share.device(), share.scalar_type()).reshape({})
          : at::ones_like(share);
  autograd::run_backward_of_part({share}, {gradient});
}

at::Tensor SeparableShare::penalty() {
  if (!problem_.loss.separable()->has_penalty()) return {};
  at::Tensor term = problem_.loss.separable()->penalty().reshape({});
  differentiate(term, {});
  return term;
}

Batch SeparableShare::take_outputs() {
  check_plain_leaves(kept_, kept_rows_, /*other_sizes=*/false);
  return join(std::move(kept_), kept_rows_, findings_.rows_seen.dims);
}

}  // namespace infinitybatch
