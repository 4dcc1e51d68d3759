// The part of Executor that runs forward on other rows once more, to see what depends on their
// number: buffers that count samples (`self.seen += len(x)`), numbers that do (`x / len(x)`).
#include "light_recording.hpp"

#include <infinitybatch/execute/executor.hpp>

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/core/exception_text.hpp>
#include <infinitybatch/core/foreign_exception.hpp>
#include <infinitybatch/core/out_of_memory.hpp>
#include <infinitybatch/core/rng.hpp>
#include <infinitybatch/coupled/row_errors.hpp>
#include <infinitybatch/execute/buffer_values.hpp>
#include <infinitybatch/execute/copied_batch.hpp>
#include <infinitybatch/tape/recorder.hpp>

#include <c10/core/GradMode.h>

#include <exception>
#include <tuple>
#include <utility>

namespace infinitybatch {

void Executor::recount(const std::function<Batch(Rows)>& load) {
  // Micro-batches of two lengths tell by themselves.
  if (uneven_ || !buffers_.written()) return;
  const int64_t here = first_.size();
  Rows rows = other_rows(first_, job_.batch_size());
  const auto run = [&](bool light) {
    aside(/*trial=*/false, [&] {
      inputs_ = load(rows);
      if (wrote_inputs_) inputs_ = copied(inputs_);
      const auto call = [&] {
        forward(rows);
        return Batch();
      };
      if (light) {
        tape::Recorder recorder(inputs_, {}, devices_of(job_));
        recorder.lighten(job_.device);
        run_lightly(recorder, call);
      } else {
        call();
      }
      outputs_ = Batch();
      buffers_.end_other_rows();
    });
  };
  const auto ask = [&] {
    try {
      run(/*light=*/true);
    } catch (const Unsupported&) {  // forward asks for gradients itself
      run(/*light=*/false);
    }
  };
  try {
    try {
      ask();
    } catch (...) {
      // It may want even numbers, as pairs of views do.
      const int64_t half = here / 2;
      if (half < 1 || !coupled::may_be_of_rows(std::current_exception())) throw;
      rows = {first_.begin, first_.begin + half};
      ask();
    }
  } catch (const Error&) {
    throw;
  } catch (...) {
    const std::exception_ptr error = std::current_exception();
    if (is_out_of_memory(error)) return;  // nobody can tell
    if (!coupled::may_be_of_rows(error)) throw;
    throw Unsupported(
        "forward writes a buffer that may count samples, which only another number of rows "
        "tells, and it fails on " +
        std::to_string(rows.size()) + " (" + first_line_of(error) +
        "); let it take any number of rows, or accept what each micro-batch leaves with "
        "batch_coupling=\"per_micro_batch\"");
  }
}

void Executor::learn_numbers(bool any) {
  PlainRuns& runs = state_.runs();
  const bool part = any || (first_.size() != 0 && first_.size() < job_.batch_size());
  if (learning_ || !part || !runs.wants_to_learn(any)) return;
  learning_ = true;
  CarriedState* const counted = std::exchange(state_at_work_, nullptr);
  const RngSnapshot random = RngSnapshot::capture(devices_of(job_));
  const auto hold_draws = watch_.hold_draws();  // of generators that the user made
  const BufferValues values(job_.buffers);
  const auto told = std::tuple(first_, uneven_, lengths_);  // of the step's own micro-batches
  const auto undo = [&] {
    outputs_ = Batch();
    release();
    std::tie(first_, uneven_, lengths_) = told;
    parameters_->end_micro_batch();
    values.restore();
    random.restore();
    hold_draws();
  };
  const auto end = [&] {
    state_at_work_ = counted;
    learning_ = false;
  };
  try {
    runs.learn(first_, job_.batch_size(), [&](Rows rows) {
      const at::NoGradGuard no_grad;  // nobody goes back
      try {
        load(rows);
        if (wrote_inputs_) inputs_ = copied(inputs_);
        forward(rows);
      } catch (...) {
        keep_foreign_exception(std::current_exception());
        undo();
        throw;
      }
      Batch outputs = std::exchange(outputs_, Batch());
      undo();
      return outputs;
    });
  } catch (...) {
    end();
    throw;
  }
  end();
}

void Executor::count_rows() {
  const std::optional<Rows> here = experiment_.may_count();
  // With a loss outside forward's recordings are somebody else's.
  if (!here || wrote_inputs_ || job_.outside != nullptr) return;
  const Rows rows = other_rows(*here, job_.batch_size());
  try {
    record_elsewhere(rows, [&](const Batch& inputs, const tape::Tape& tape, const Batch& outputs) {
      experiment_.meet_others(rows.size(), inputs, tape, outputs);
    });
  } catch (...) {
    const std::exception_ptr error = std::current_exception();
    if (!is_out_of_memory(error) && !coupled::may_be_of_rows(error)) throw;
    experiment_.meet_no_others();  // nobody can tell
  }
}

void Executor::aside(bool trial, const std::function<void()>& forward) {
  const RngSnapshot random = RngSnapshot::capture(devices_of(job_));
  const auto hold_draws = watch_.hold_draws();  // of generators that the user made
  const BufferValues values(job_.buffers);
  const auto told = std::tuple(first_, uneven_, lengths_);  // of the step's own micro-batches
  CarriedState trial_state(watch_.memory(), state_);
  state_at_work_ = &trial_state;
  const auto undo = [&] {
    outputs_ = Batch();
    release();
    state_at_work_ = &state_;
    trial_state.roll_back();
    std::tie(first_, uneven_, lengths_) = told;
    trial ? parameters_->end_trial() : parameters_->end_micro_batch();
    values.restore();
    random.restore();
    hold_draws();
  };
  try {
    forward();
  } catch (...) {
    undo();
    watch_.forget_errors();
    throw;
  }
  undo();
}

void Executor::record_elsewhere(
    Rows rows,
    const std::function<void(const Batch& inputs, const tape::Tape&, const Batch& outputs)>& use) {
  std::vector<at::Tensor> buffers;
  for (const BufferSlot& slot : job_.buffers) {
    if (at::Tensor buffer = slot.get(); buffer.defined()) buffers.push_back(std::move(buffer));
  }
  aside(/*trial=*/false, [&] {
    load(rows);
    tape::Recorder recorder(inputs_, buffers, devices_of(job_));
    // One that is cut for memory, or offloads, has no room for a graph.
    if (job_.cut && (job_.checkpoints != nullptr || job_.store != nullptr))
      recorder.lighten(job_.device);
    const Batch outputs = recorder.run([&] {
      forward(rows);
      return std::exchange(outputs_, Batch());
    });
    use(inputs_, recorder.finish(outputs), outputs);
  });
}

}  // namespace infinitybatch
