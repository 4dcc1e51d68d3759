#include "step/wrap_rehearsal.hpp"

#include "core/foreign_exception.hpp"
#include "core/rng.hpp"
#include "execute/executor.hpp"
#include "execute/external_loss.hpp"
#include "execute/findings.hpp"
#include "step/left_outputs.hpp"
#include "step/meter.hpp"

#include <exception>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace infinitybatch {
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
  const RngSnapshot random = RngSnapshot::capture(devices_of(call.problem));
  // A small batch has too few rows to time every size in one pass over them.
  constexpr int kPasses = 8;
  Setup setup = call;
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
  const bool times = setup.strategy.offloads() && !setup.strategy.is_cut();
  StaticTapes rehearsed;
  if (is_static) {
    rehearsed = static_tapes(setup.problem);
    setup.strategy.reuses_tapes = true;
    setup.resources.static_tapes = &rehearsed;
  }
  setup.problem.rehearses = true;
  std::optional<RehearsedLoss> loss;
  std::optional<Executor> executor;
  const auto begin = [&] {
    executor.reset();
    if (setup.strategy.is_cut()) setup.problem.loss = loss.emplace();
    executor.emplace(setup);
    executor->look_for_few_rows();
  };
  try {
    for (int pass = 0; pass < kPasses; ++pass) {
      begin();
      planner.begin(request());
      began = true;
      int64_t row = 0;
      while (const std::optional<Piece> piece = planner.next()) {
        planner.observe(*piece, run_planned(*executor, *piece, row, setup.problem.device));
        if (times) choices.add(request(), piece->plan, executor->take_times());
        executor->checks().examine();
        row += piece->plan.batch_size;
        check_inputs();
        if (!setup.strategy.is_cut()) continue;
        // Each piece stands for a whole batch.
        setup.resources.findings->recordings_checked = true;
        executor->roll_back();
        if (setup.problem.match_native_rng) random.restore();
        begin();
      }
      executor->roll_back();
      executor.reset();
      random.restore();
      if (planner.settled()) break;
    }
    // The call itself checks no recordings again: what that takes is no part of the plan.
    wrapped.keep(kind, *setup.resources.findings);
  } catch (...) {
    keep_foreign_exception(std::current_exception());
    if (executor) {
      failed_rows = executor->failed_rows();
      executor->roll_back();
    }
    executor.reset();
    random.restore();
    throw;
  }
}

}  // namespace infinitybatch
