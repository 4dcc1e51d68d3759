// The part of Executor that runs the user's forward while it is recorded.
#include "execute/executor.hpp"

#include "core/batch_form.hpp"

#include <infinitybatch/core/errors.hpp>

#include <utility>

namespace infinitybatch {

void Executor::record(Rows rows, bool retain) {
  forwards_.load(rows);
  const bool outside = problem_.loss.external() != nullptr;
  const bool first_of_several =
      forwards_.first().begin == rows.begin && rows.size() < problem_.batch_size();
  const bool asked = checks_.asks(rows);
  const bool tells = (strategy_.replays() && asked) || (outside && first_of_several);
  const auto call = [&] {
    if (!outside || !retain) return forwards_.call(rows);
    struct Installed {
      explicit Installed(autograd::GradientSinks& sinks) : sinks(sinks) { sinks.install(); }
      ~Installed() { sinks.uninstall(); }
      autograd::GradientSinks& sinks;
    } const installed(sinks_);
    return forwards_.call(rows);
  };
  Batch given;
  const Batch& seen = pass_.first(rows, forwards_.inputs, retain, tells ? &given : nullptr, call);
  if (outside && forwards_.saw_across_batch()) {
    // The tape has its number alone, which is forgotten with this pass.
    pass_.run_again(rows, "a function of across_batch");
  }
  if (forwards_.wrote_inputs() && outside) {
    // They are rows of one tensor: for torch what one micro-batch writes is written in all.
    pass_.drop_graphs();
  } else if (forwards_.wrote_inputs() && pass_.keeps_graph_before(rows)) {
    throw Unsupported(
        "forward changes its inputs in place, which are rows of one tensor: for torch that spoils "
        "the graphs of other micro-batches that are kept; write that out of place, as in x = x - "
        "mean, or keep no graphs (retained_micro_batches=0). The rows that it ran on are changed");
  }
  if (problem_.on_micro_batch)
    problem_.on_micro_batch({rows.begin, rows.end, seen, forwards_.targets});
  const bool learns = checks_.learns_output_law(rows);
  const Batch inputs = learns ? without_tensors(forwards_.inputs) : Batch();
  checks_.look_at(rows, forwards_.inputs, pass_.tape(rows), given);
  given = Batch();
  free();
  forwards_.learn_numbers();
  if (learns) checks_.learn_outputs(rows, inputs, seen, pass_.tape(rows));
  pass_.has_told(rows);
  // Buffers that were restored under a graph could belong to what it has saved.
  const bool restored = forwards_.restores();
  if (restored && outside) pass_.drop_graphs();
  if (restored && retain) pass_.drop_graph(rows);
}

void Executor::record_for_cuts(Rows rows) {
  if (problem_.interrupt) problem_.interrupt();
  // A recording that is used again tells nobody how outputs follow the samples.
  const bool reuses = !strategy_.per_micro_batch() && !checks_.learns_output_law(rows);
  const bool compares = reuses && pass_.compares(rows);
  if (reuses && !compares && pass_.reuse(rows)) return;
  if (!compares) forwards_.load(rows);
  const auto call = [&](Rows at_work) {
    forwards_.run(at_work);
    if (forwards_.wrote_inputs()) {
      throw Unsupported(
          "forward changes its inputs in place, and has to run on them again (for a layer that "
          "sees the whole batch, or because one sample's activations do not fit into the budget); "
          "write that out of place, as in x = x - mean. The rows that it ran on are changed");
    }
    if (strategy_.per_micro_batch()) forwards_.check_coupling(rows);
    return std::exchange(forwards_.outputs, Batch());
  };
  if (compares) {
    forwards_.aside(/*trial=*/false, [&] {
      forwards_.load(rows);
      const Batch inputs = forwards_.inputs;
      pass_.compare(rows, inputs, forwards_.watch(), [&] { return call(rows); });
    });
    if (pass_.reuse(rows)) return;
    forwards_.load(rows);
  }
  if (strategy_.per_micro_batch()) {
    Batch given = pass_.checkpoint(rows, forwards_.inputs, [&] { return call(rows); });
    if (whole_) {
      given = whole_->add(rows, given);
      if (problem_.on_micro_batch)
        problem_.on_micro_batch({rows.begin, rows.end, given, forwards_.targets});
    }
    const Batch inputs = without_tensors(forwards_.inputs);
    checks_.look_at(rows, forwards_.inputs, pass_.tape(rows), given);
    free();
    forwards_.learn_numbers();
    if (checks_.learns_output_law(rows))
      checks_.learn_outputs(rows, inputs, given, pass_.tape(rows));
    given = Batch();
    // Until a coupled loss is known the other micro-batches need the room.
    if (whole_ && strategy_.offloads()) {
      pass_.offload(rows);
      whole_->offload(rows);
    }
    // Buffers that were restored under a graph could belong to what it has saved.
    if (forwards_.buffers().restores_memory()) pass_.drop_graph(rows);
    return;
  }
  const Batch inputs = forwards_.inputs;
  const Batch targets = forwards_.targets;
  const auto elsewhere = [&](Rows others, const RecordableForward::Run& run) {
    forwards_.load(others);
    run(forwards_.inputs, [&] { return forwards_.uncounted([&] { return call(others); }); });
    forwards_.inputs = inputs;
    forwards_.targets = targets;
  };
  const auto again = [&] { return forwards_.uncounted([&] { return call(rows); }); };
  const auto once = [&, recorded = false]() mutable {
    if (std::exchange(recorded, true)) forwards_.state().runs().count_anew();
    return call(rows);
  };
  const Batch given = pass_.record(rows, inputs, forwards_.watch(), {once, again, elsewhere});
  checks_.look_at(rows, inputs, pass_.tape(rows), given);
  free();
  forwards_.learn_numbers();
  if (checks_.learns_output_law(rows)) checks_.learn_outputs(rows, inputs, given, pass_.tape(rows));
}

}  // namespace infinitybatch
