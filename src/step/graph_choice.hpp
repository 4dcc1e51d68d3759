#pragma once

#include "execute/pass_times.hpp"
#include "offload/store.hpp"
#include "plan/planner.hpp"

#include <infinitybatch/execute/plan.hpp>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>

namespace infinitybatch {

/// Whether the graphs of all micro-batches are kept away from the device, and why.
struct GraphChoice {
  bool offloads = false;
  std::string reason;
};

/// Chooses, once for each kind of batch, between second forwards and graphs that are kept away from
/// the device: whichever takes less time, as far as rehearsals of both tell.
class GraphChoices {
 public:
  /// What a piece of a rehearsal took.
  void add(const Request& request, const Plan& piece, const PassTimes& taken);

  bool empty() const noexcept { return chosen_.empty(); }
  /// Null where nothing is chosen yet.
  const GraphChoice* find(const std::string& kind) const;
  bool offloads(const std::string& kind) const;

  /// How graphs that are offloaded are planned.
  struct OffloadWay {
    std::function<Request()> request;
    std::function<void()> rehearse;  ///< begins so, and adds what it took
  };
  /// Chooses for batches of this kind, if enough is known then.
  /// \param again  the plan of second forwards, whose rehearsal is over
  /// \param asked  what it was planned for
  void choose(const std::string& kind, Planner& planner, const offload::Store& store,
              const Plan& again, const Request& asked, const OffloadWay& offload_way);

  /// From now on second forwards; false where graphs were not offloaded by choice.
  bool give_up(const std::string& kind);

 private:
  /// How a plan's story ends in time.
  struct Timed {
    Plan plan;
    PassTimes times;
    double seconds = 0;
    double waited = 0;  // of these, for copies
  };
  Timed timed(const Plan& plan, const Request& request, const offload::Store& store) const;
  std::optional<GraphChoice> compare(Planner& planner, const offload::Store& store,
                                     const Plan& again, const Request& asked,
                                     const OffloadWay& offload_way) const;

  /// By what the planner was asked: by micro-batch size.
  std::map<std::string, std::map<int64_t, PassTimes>> rehearsed_;
  std::map<std::string, GraphChoice> chosen_;
};

}  // namespace infinitybatch
