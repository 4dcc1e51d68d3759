#pragma once

#include "step/few_rows.hpp"

#include <infinitybatch/core/errors.hpp>

#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace infinitybatch {

/// What made an attempt at a step fail.
enum class Failure : uint8_t {
  other_replay,        ///< a replay gave other outputs than its recording
  other_values,        ///< values decide what forward does, and a recording was used again
  other_segments,      ///< more or fewer ops see the whole batch than were planned for
  nothing_to_cut,      ///< none does
  coupling,            ///< samples are coupled
  not_joined,          ///< outputs of micro-batches are no outputs of the batch, or inputs no batch
  no_room_to_look,     ///< at the rows of two samples side by side
  looked_too_far,      ///< on an accelerator, at more rows than fit
  no_plan,             ///< that stays inside the budget
  no_room_to_offload,  ///< on host and disk
  out_of_memory,
  segment_out_of_memory,  ///< the same, where one sample is cut for memory
  loss_out_of_memory,     ///< the same, in the loss of all outputs
  other,
};

/// How a step goes on.
enum class Answer : uint8_t {
  rerun_forwards,         ///< second forwards run the model, not its tape
  record_anew,            ///< each micro-batch
  look_less,              ///< rows are looked at in less of the room
  follow_segments,        ///< the plan is made for the number that was found
  cut,                    ///< tapes are cut where ops see the whole batch
  stop_cutting,           ///< they cannot be, or need not be
  whole_batch,            ///< the batch is one micro-batch, which couples nothing
  larger_micro_batches,   ///< forward failed on a few samples
  drop_graphs,            ///< that other calls keep for their backward
  copy_in_turn,           ///< what is offloaded, not beside other micro-batches' work
  smaller_micro_batches,  ///< or fewer graphs kept, as the planner says
  second_forwards,        ///< in place of graphs that wait away from the device
  recompute,              ///< of what waits at whole-batch ops some is computed again
  offload,                ///< what waits leaves the device
  checkpoint,             ///< one sample is cut for memory
  drop_boundaries,        ///< that other calls keep: they run forward again
  smaller_segments,
  forward_again,     ///< what waits for a coupled loss is made again after it
  forget_frontiers,  ///< and so is what waits at cuts
};

/// The only place where a step changes its mind: answers to a failure, in the order in which they
/// are tried. Where none applies the error is raised.
struct Recovery {
  Failure failure;
  std::vector<Answer> answers;
};
const std::vector<Recovery>& recovery_table();

/// What an attempt has thrown.
struct Failed {
  Failed() = default;
  explicit Failed(std::exception_ptr what);

  Failure failure = Failure::other;
  std::exception_ptr error;
  int64_t segments = 0;                   ///< of `other_segments`
  int64_t looked_at = 0;                  ///< of `looked_too_far`: rows
  std::optional<BudgetExceeded> refusal;  ///< of `no_plan`, or what the planner has said since

  class Scope;
};

/// What an exception holds (a traceback, its frames, their tensors) must not lie beside the next
/// attempt: `failed` is what was thrown only while it is answered.
class Failed::Scope {
 public:
  Scope(Failed& failed, std::exception_ptr what) : failed_(failed) {
    failed_ = Failed(std::move(what));
  }
  ~Scope() { failed_ = Failed(); }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  Failed& failed_;
};

/// How each answer is given, from now on: false where it is not possible, or would not help. What
/// is not among them is never possible.
using Answers = std::map<Answer, std::function<bool()>>;
/// Goes through the answers to a failure. The first that could be given; nothing where none could.
std::optional<Answer> recover(Failure failure, const Answers& answers);

/// Where no answer could be given: what the user sees.
/// \param way_out of which the error tells first
[[noreturn]] void refuse_given_segments(const std::string& way_out);
/// \param failed   whose refusal that is, unless forward fails on a few samples
/// \param samples of the batch
[[noreturn]] void refuse_budget(const Failed& failed, infinitybatch::FewRows& few_rows,
                                int64_t samples);

/// Whether the attempt that follows is one that reports count: memory has run out, or what was
/// believed was wrong.
bool is_restart(Answer answer) noexcept;

}  // namespace infinitybatch
