#include "step/wrap_rehearsal.hpp"

#include "execute/executor.hpp"
#include "execute/external_loss.hpp"
#include "execute/findings.hpp"
#include "step/left_outputs.hpp"
#include "step/rehearsal.hpp"

#include <infinitybatch/core/errors.hpp>

#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace infinitybatch {

const CoupledLoss& no_loss() {
  static const CoupledLoss loss = losses::coupled([](const Batch&, const Batch&) -> at::Tensor {
    throw StateError("a rehearsal asked for the loss of a wrapped model");
  });
  return loss;
}

namespace {

/// Stands for the caller's loss while sizes are measured: outputs wait for it.
class RehearsedLoss final : public ExternalLoss {
 public:
  Batch take(Rows rows, const Batch& /*inputs*/, Batch outputs) override {
    outputs_[rows.begin] = detached(outputs);
    return outputs;
  }
  Batch& taken(Rows rows) override { return outputs_[rows.begin]; }
  Batch forward_again(const Batch& /*inputs*/) override { return {}; }
  void compare(Rows /*rows*/, const Batch& /*outputs*/) override {}
  at::Tensor gradient(Rows /*rows*/, size_t /*leaf*/, const at::Tensor& /*output*/) const override {
    return {};
  }
  void collect(Rows /*rows*/, const Batch& /*inputs*/) override {}

 private:
  std::map<int64_t, Batch> outputs_;  // by first row
};

}  // namespace

/// Inputs want their gradient here too: it occupies memory.
Batch WrapRehearsal::wanting(int64_t begin, int64_t end) const {
  Batch given = to_device(rows.rows(begin, end), call.problem.device);
  for (size_t i = 0; i < given.leaves().size(); ++i) {
    at::Tensor& tensor = given.leaves()[i].tensor;
    if (!tensor.defined()) continue;
    tensor = tensor.detach();
    tensor.set_requires_grad(inputs.leaves()[i].tensor.requires_grad());
  }
  return given;
}

/// What is recorded here nobody has looked at for leaves that get a gradient: later calls must not
/// use it.
StaticTapes WrapRehearsal::static_tapes(const Problem& problem) const {
  std::vector<size_t> wanted;
  for (size_t i = 0; i < inputs.leaves().size(); ++i) {
    const at::Tensor& tensor = inputs.leaves()[i].tensor;
    if (with_gradients && tensor.defined() && tensor.requires_grad()) wanted.push_back(i);
  }
  const std::string forward = kind_of_forward(kind, problem, wanted, with_gradients);
  return wrapped.static_forward_of(problem, forward).tapes;
}

void WrapRehearsal::run() {
  if (planner.settled_for(request())) return;
  Rehearsal rehearsal{planner, choices, call, request,
                      [this](const Executor& executor, Rows rows, const Measurement& measured) {
                        check_inputs();
                        learn(executor, rows, measured);
                      }};
  Setup& setup = rehearsal.setup;
  BatchSource source = rows;
  source.rows = [this](int64_t begin, int64_t end) { return wanting(begin, end); };
  setup.problem.inputs = &source;
  // What forward leaves beside its outputs occupies memory, too.
  const bool is_static = wrapped.options.static_graph;
  LeftOutputs left(call.problem.exact_coupling ? wrapped.own.left_places : LeftOutputs::Look(),
                   rows.size, room_for_left(wrapped, call.problem.device), !is_static);
  Model model = *call.problem.model;
  model.forward = [&](const Batch& micro) {
    Batch outputs = left.with_left(batch_size(micro, "inputs"),
                                   [&] { return call.problem.model->forward(micro); });
    if (left.count() > 0) wrapped.joining = true;
    return outputs;
  };
  setup.problem.model = &model;
  StaticTapes rehearsed;
  if (is_static) {
    rehearsed = static_tapes(setup.problem);
    setup.strategy.reuses_tapes = true;
    setup.resources.static_tapes = &rehearsed;
  }
  std::optional<RehearsedLoss> loss;
  rehearsal.in_front = [&](Setup& next) {
    if (next.strategy.is_cut()) next.problem.loss = loss.emplace();
  };
  try {
    rehearsal.run();
    began = rehearsal.began;
  } catch (...) {
    began = rehearsal.began;
    failed_rows = rehearsal.failed_rows;
    throw;
  }
  // The call itself checks no recordings again: what that takes is no part of the plan.
  wrapped.keep(kind, *setup.resources.findings);
}

}  // namespace infinitybatch
