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
      {Failure::no_room_to_look, {drop_graphs}},
      {Failure::no_plan, {drop_graphs, second_forwards, offload, checkpoint}},
      {Failure::no_room_to_offload, {second_forwards}},
      {Failure::out_of_memory,
       {drop_graphs, copy_in_turn, smaller_micro_batches, second_forwards, offload, checkpoint}},
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
  } catch (const NoRoomToLook&) {
    failure = Failure::no_room_to_look;
  } catch (const BudgetExceeded& exceeded) {
    failure = Failure::no_plan;
    refusal = exceeded;
  } catch (const OffloadError&) {
    failure = Failure::no_room_to_offload;
  } catch (...) {
    if (is_out_of_memory(error)) failure = Failure::out_of_memory;
  }
}

std::optional<Answer> recover(Failure failure, const std::function<bool(Answer)>& apply) {
  for (const Recovery& row : recovery_table()) {
    if (row.failure != failure) continue;
    for (const Answer answer : row.answers) {
      if (apply(answer)) return answer;
    }
  }
  return std::nullopt;
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

const char* name_of(Failure failure) noexcept {
  switch (failure) {
    case Failure::other_replay:
      return "other replay";
    case Failure::other_values:
      return "other values";
    case Failure::other_segments:
      return "other segments";
    case Failure::nothing_to_cut:
      return "nothing to cut";
    case Failure::coupling:
      return "coupling";
    case Failure::no_room_to_look:
      return "no room to look";
    case Failure::no_plan:
      return "no plan";
    case Failure::no_room_to_offload:
      return "no room to offload";
    case Failure::out_of_memory:
      return "out of memory";
    case Failure::segment_out_of_memory:
      return "segment out of memory";
    case Failure::loss_out_of_memory:
      return "loss out of memory";
    case Failure::other:
      return "other";
  }
  return "";
}

const char* name_of(Answer answer) noexcept {
  switch (answer) {
    case Answer::rerun_forwards:
      return "rerun forwards";
    case Answer::record_anew:
      return "record anew";
    case Answer::follow_segments:
      return "follow segments";
    case Answer::cut:
      return "cut";
    case Answer::stop_cutting:
      return "stop cutting";
    case Answer::whole_batch:
      return "whole batch";
    case Answer::larger_micro_batches:
      return "larger micro-batches";
    case Answer::drop_graphs:
      return "drop graphs";
    case Answer::copy_in_turn:
      return "copy in turn";
    case Answer::smaller_micro_batches:
      return "smaller micro-batches";
    case Answer::second_forwards:
      return "second forwards";
    case Answer::offload:
      return "offload";
    case Answer::checkpoint:
      return "checkpoint";
    case Answer::smaller_segments:
      return "smaller segments";
    case Answer::forward_again:
      return "forward again";
    case Answer::forget_frontiers:
      return "forget frontiers";
  }
  return "";
}

}  // namespace infinitybatch
