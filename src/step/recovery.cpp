#include "step/recovery.hpp"

#include "core/out_of_memory.hpp"
#include "execute/external_loss.hpp"
#include "execute/row_look.hpp"
#include "step/meter.hpp"
#include "tape/mismatch.hpp"
#include "tape/witness.hpp"

#include <utility>

namespace infinitybatch {

const std::vector<Recovery>& recovery_table() {
  using enum Answer;
  static const std::vector<Recovery> table = {
      {Failure::other_replay, {rerun_forwards}},
      {Failure::other_values, {record_anew}},
      {Failure::other_segments, {follow_segments}},
      {Failure::nothing_to_cut, {stop_cutting}},
      {Failure::coupling, {cut, stop_cutting, whole_batch}},
      {Failure::not_joined, {larger_micro_batches, whole_batch}},
      {Failure::no_room_to_look, {drop_graphs, drop_boundaries}},
      {Failure::looked_too_far, {look_less}},
      {Failure::no_plan,
       {drop_graphs, second_forwards, recompute, offload, checkpoint, drop_boundaries}},
      {Failure::no_room_to_offload, {second_forwards}},
      {Failure::out_of_memory,
       {drop_graphs, copy_in_turn, smaller_micro_batches, second_forwards, recompute, offload,
        checkpoint, drop_boundaries}},
      {Failure::segment_out_of_memory,
       {smaller_segments, offload, forward_again, forget_frontiers}},
      {Failure::loss_out_of_memory, {offload, forward_again}},
      {Failure::other, {larger_micro_batches}},
  };
  return table;
}

Failed::Failed(std::exception_ptr what) : error(std::move(what)) {
  try {
    std::rethrow_exception(error);
  } catch (const tape::Mismatch&) {
    failure = Failure::other_replay;
  } catch (const tape::OtherValues&) {
    failure = Failure::other_values;
  } catch (const SegmentsChanged& changed) {
    failure = Failure::other_segments;
    segments = changed.segments();
  } catch (const NothingToCut&) {
    failure = Failure::nothing_to_cut;
  } catch (const CouplingError&) {
    failure = Failure::coupling;
  } catch (const BatchError&) {
    failure = Failure::not_joined;
  } catch (const NoRoomToLook& exceeded) {
    failure = Failure::no_room_to_look;
    refusal = exceeded;
  } catch (const LookedTooFar& looked) {
    failure = Failure::looked_too_far;
    looked_at = looked.rows;
  } catch (const BudgetExceeded& exceeded) {
    failure = Failure::no_plan;
    refusal = exceeded;
  } catch (const OffloadError&) {
    failure = Failure::no_room_to_offload;
  } catch (...) {
    if (is_out_of_memory(error)) failure = Failure::out_of_memory;
  }
}

std::optional<Answer> recover(Failure failure, const Answers& answers) {
  for (const Recovery& row : recovery_table()) {
    if (row.failure != failure) continue;
    for (const Answer answer : row.answers) {
      const auto given = answers.find(answer);
      if (given != answers.end() && given->second()) return answer;
    }
  }
  return std::nullopt;
}

void refuse_given_segments(const std::string& way_out) {
  throw CouplingError("aten::batch_norm",
                      "the model does not run its layers that see the whole batch equally often "
                      "each time; " +
                          way_out +
                          ", put them into eval mode, or accept another gradient with "
                          "batch_coupling=\"per_micro_batch\"");
}

void refuse_budget(const Failed& failed, FewRows& few_rows, int64_t samples) {
  if (few_rows.failing() != 0) few_rows.refuse(samples, *failed.refusal);
  if (failed.failure == Failure::no_plan) std::rethrow_exception(failed.error);
  throw *failed.refusal;
}

bool is_restart(Answer answer) noexcept {
  switch (answer) {
    case Answer::follow_segments:
    case Answer::cut:
    case Answer::stop_cutting:
    case Answer::whole_batch:
    case Answer::larger_micro_batches:
      return false;
    default:
      return true;
  }
}

}  // namespace infinitybatch
