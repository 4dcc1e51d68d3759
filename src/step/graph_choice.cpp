#include "step/graph_choice.hpp"

#include "core/out_of_memory.hpp"

#include <infinitybatch/core/bytes.hpp>
#include <infinitybatch/core/errors.hpp>

#include <algorithm>
#include <exception>
#include <utility>

namespace infinitybatch {
namespace {

constexpr const char* kNoRoomForOne =
    "graphs are not offloaded: one does not fit beside what else is there";

}  // namespace

void GraphChoices::add(const Request& request, const Plan& piece, const PassTimes& taken) {
  rehearsed_[request.signature][piece.micro_batch_size()].add(taken);
}

const GraphChoice* GraphChoices::find(const std::string& kind) const {
  const auto found = chosen_.find(kind);
  return found != chosen_.end() ? &found->second : nullptr;
}

bool GraphChoices::offloads(const std::string& kind) const {
  const GraphChoice* choice = find(kind);
  return choice != nullptr && choice->offloads;
}

bool GraphChoices::give_up(const std::string& kind) {
  if (!offloads(kind)) return false;
  chosen_[kind] = {false, "graphs are not offloaded: there was no room for them"};
  return true;
}

void GraphChoices::choose(const std::string& kind, Planner& planner, const offload::Store& store,
                          const Plan& again, const Request& asked, const OffloadWay& offload_way) {
  std::optional<GraphChoice> choice;
  try {
    choice = compare(planner, store, again, asked, offload_way);
  } catch (const BudgetExceeded&) {
    choice = {false, kNoRoomForOne};
  } catch (const OffloadError& error) {
    choice = {false, std::string("graphs are not offloaded: ") + error.what_without_backtrace()};
  } catch (...) {
    if (!is_out_of_memory(std::current_exception())) throw;
    choice = {false, "graphs are not offloaded: memory ran out"};
  }
  if (choice) chosen_[kind] = std::move(*choice);
}

GraphChoices::Timed GraphChoices::timed(const Plan& plan, const Request& request,
                                        const offload::Store& store) const {
  Timed timed;
  timed.plan = plan;
  const auto asked = rehearsed_.find(request.signature);
  if (asked != rehearsed_.end()) {
    // Or of which the largest that is there is a part.
    const auto size = asked->second.lower_bound(plan.micro_batch_size());
    if (size != asked->second.end()) timed.times = size->second;
  }
  const offload::StoreStatistics link = store.statistics();
  timed.times.set_link(link.moved_out, link.seconds_out, link.moved_back, link.seconds_back);
  timed.seconds = simulate_seconds(timed.plan, timed.times);
  timed.waited = simulate_copies(timed.plan, timed.times).waited;
  return timed;
}

std::optional<GraphChoice> GraphChoices::compare(Planner& planner, const offload::Store& store,
                                                 const Plan& again, const Request& asked,
                                                 const OffloadWay& offload_way) const {
  const Timed forwards = timed(again, asked, store);
  std::optional<Timed> offloaded;
  bool best_in_turn = false;
  const auto begin = [&](bool in_turn) {
    planner.begin(offload_way.request());
    planner.copy_in_turn(in_turn);
  };
  for (const bool in_turn : {false, true}) {
    try {
      begin(in_turn);
      offload_way.rehearse();
    } catch (const BudgetExceeded&) {
      continue;  // no size leaves that much room
    }
    if (planner.nothing_fits()) continue;
    if (!planner.settled()) return std::nullopt;
    Timed found = timed(planner.plan(), offload_way.request(), store);
    if (offloaded && offloaded->seconds <= found.seconds) continue;
    offloaded = std::move(found);
    best_in_turn = in_turn;
  }
  if (!offloaded) return GraphChoice{false, kNoRoomForOne};
  begin(best_in_turn);
  const auto all =
      static_cast<int64_t>(offloaded->times.bytes_per_sample(Operation::finish_offload) *
                           static_cast<double>(asked.batch_size));
  if (!store.options().disk && all > store.options().host_bytes) {
    return GraphChoice{false,
                       "graphs are not offloaded: there is no room for " + format_bytes(all)};
  }
  const double more = forwards.seconds - forwards.waited - (offloaded->seconds - offloaded->waited);
  GraphChoice choice;
  choice.offloads = offloaded->seconds < forwards.seconds;
  choice.reason = std::string("graphs are ") + (choice.offloads ? "" : "not ") +
                  "offloaded: of their copies " + format_seconds(offloaded->waited) +
                  " would not be hidden, second forwards take " +
                  format_seconds(std::max(0.0, more)) + " more";
  return choice;
}

}  // namespace infinitybatch
