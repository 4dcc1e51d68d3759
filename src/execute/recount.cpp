// The part of RowChecks that runs forward on other rows once more, to see what depends on their
// number: buffers that count samples (`self.seen += len(x)`), numbers that do (`x / len(x)`).
#include "core/exception_text.hpp"
#include "core/foreign_exception.hpp"
#include "core/out_of_memory.hpp"
#include "core/rng.hpp"
#include "coupled/row_errors.hpp"
#include "execute/buffer_values.hpp"
#include "execute/copied_batch.hpp"
#include "execute/light_recording.hpp"
#include "execute/row_checks.hpp"
#include "tape/recorder.hpp"

#include <infinitybatch/core/errors.hpp>

#include <c10/core/GradMode.h>

#include <exception>
#include <tuple>
#include <utility>

namespace infinitybatch {

void RowChecks::recount(const std::function<Batch(Rows)>& load) {
  // Micro-batches of two lengths tell by themselves.
  if (forwards_.uneven() || !forwards_.buffers().written()) return;
  const int64_t here = forwards_.first().size();
  Rows rows = other_rows(forwards_.first(), problem_.batch_size());
  const auto run = [&](bool light) {
    forwards_.aside(/*trial=*/false, [&] {
      forwards_.inputs = load(rows);
      if (forwards_.wrote_inputs()) forwards_.inputs = copied(forwards_.inputs);
      const auto call = [&] {
        forwards_.run(rows);
        return Batch();
      };
      if (light) {
        tape::Recorder recorder(forwards_.inputs, {}, devices_of(problem_));
        recorder.lighten(problem_.device);
        run_lightly(recorder, call);
      } else {
        call();
      }
      forwards_.outputs = Batch();
      forwards_.end_other_rows();
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
      rows = {forwards_.first().begin, forwards_.first().begin + half};
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

void RowChecks::count_rows() {
  const std::optional<Rows> here = experiment_.may_count();
  // With cuts and a loss outside micro-batches of two lengths tell.
  if (!here || forwards_.wrote_inputs() ||
      (strategy_.is_cut() && problem_.loss.external() != nullptr))
    return;
  const Rows rows = other_rows(*here, problem_.batch_size());
  try {
    forwards_.record_elsewhere(
        rows, [&](const Batch& inputs, const tape::Tape& tape, const Batch& outputs) {
          experiment_.meet_others(rows.size(), inputs, tape, outputs);
        });
  } catch (...) {
    const std::exception_ptr error = std::current_exception();
    if (!is_out_of_memory(error) && !coupled::may_be_of_rows(error)) throw;
    experiment_.meet_no_others();  // nobody can tell
  }
}

}  // namespace infinitybatch
