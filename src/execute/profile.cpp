#include "execute/profile.hpp"

#include "execute/schedule.hpp"

#include <algorithm>
#include <cmath>
#include <unordered_map>
#include <unordered_set>

namespace infinitybatch {
namespace {

/// A trace with addresses replaced by block numbers, in order of allocation.
struct Story {
  std::vector<double> sizes;  // of each block
  std::vector<ProfileEvent> events;
  std::vector<size_t> starts;
};

/// Takes out what differs between the first micro-batch and later ones: the first gradient of a
/// parameter becomes (or is copied into) its buffer, later ones are freed as soon as they are
/// added.
class StoryTeller {
 public:
  explicit StoryTeller(const MicroBatchTrace& trace) : trace_(trace) {
    std::unordered_set<const void*> known;  // of an earlier gradient
    for (const auto& mark : trace.sinks) {
      const bool is_new = known.insert(mark.what.buffer).second;
      if (is_new && mark.what.buffer != mark.what.gradient) find_buffer(mark);
    }
  }

  Story tell() {
    size_t sink = 0;
    size_t operation = 0;
    for (size_t i = 0; i <= trace_.events.size(); ++i) {
      for (; sink < trace_.sinks.size() && trace_.sinks[sink].event <= i; ++sink) {
        gradient(trace_.sinks[sink]);
      }
      for (; operation < trace_.operation_starts.size() && trace_.operation_starts[operation] <= i;
           ++operation) {
        story_.starts.push_back(story_.events.size());
      }
      if (i < trace_.events.size() && !buffers_.contains(i)) happen(trace_.events[i]);
    }
    return std::move(story_);
  }

 private:
  /// A buffer made inside a sink belongs to the gradient's own event. Others may have lain at its
  /// address before.
  void find_buffer(const MicroBatchTrace::SinkMark& mark) {
    for (size_t i = mark.event; i-- > 0;) {
      const memory::AllocationEvent& event = trace_.events[i];
      if (event.address != mark.what.buffer) continue;
      if (event.bytes > 0) buffers_.insert(i);
      return;
    }
  }

  void happen(const memory::AllocationEvent& event) {
    if (event.bytes > 0) {
      const auto block = static_cast<uint32_t>(story_.sizes.size());
      story_.sizes.push_back(static_cast<double>(event.bytes));
      live_[event.address] = block;
      story_.events.push_back({ProfileEvent::Kind::allocate, block, 0, false});
    } else if (const auto found = live_.find(event.address); found != live_.end()) {
      if (!given_.contains(found->second)) {
        story_.events.push_back({ProfileEvent::Kind::free, found->second, 0, false});
      }
      live_.erase(found);
    }
  }

  void gradient(const MicroBatchTrace::SinkMark& mark) {
    const autograd::SinkEvent& event = mark.what;
    const auto found = live_.find(event.gradient);
    if (found == live_.end()) return;  // a view, or sparse: freed like any other block
    given_.insert(found->second);
    // A parameter that several segments use has one buffer.
    const bool again = !seen_.insert(event.buffer).second;
    story_.events.push_back({ProfileEvent::Kind::gradient, found->second, event.buffer_bytes,
                             mark.taken_over(), again});
  }

  const MicroBatchTrace& trace_;
  std::unordered_set<size_t> buffers_;  // events
  std::unordered_map<const void*, uint32_t> live_;
  std::unordered_set<uint32_t> given_;
  std::unordered_set<const void*> seen_;  // buffers that a gradient has met
  Story story_;
};

bool same_plot(const Story& a, const Story& b) {
  return a.sizes.size() == b.sizes.size() && a.starts == b.starts &&
         std::equal(a.events.begin(), a.events.end(), b.events.begin(), b.events.end(),
                    [](const ProfileEvent& x, const ProfileEvent& y) {
                      return x.kind == y.kind && x.block == y.block;
                    });
}

}  // namespace

void MicroBatchTrace::inherit(const MicroBatchTrace& earlier) {
  if (earlier.sinks.size() != sinks.size()) return;
  for (size_t i = 0; i < sinks.size(); ++i) {
    sinks[i].inherited = earlier.sinks[i].taken_over();
  }
}

std::vector<Step> steps_of(const Plan& plan) {
  std::vector<Step> steps;
  for (const Instruction& instruction : plan.instructions) {
    if (!is_told(instruction)) continue;
    Step step(instruction);
    step.again = std::find(steps.begin(), steps.end(), step) != steps.end();
    steps.push_back(step);
  }
  return steps;
}

std::optional<MicroBatchProfile> MicroBatchProfile::fit(const MicroBatchTrace& a,
                                                        const MicroBatchTrace& b,
                                                        const std::vector<Step>& steps,
                                                        int64_t rounding) {
  const Story first = StoryTeller(a).tell();
  const Story second = StoryTeller(b).tell();
  if (a.size == b.size || !same_plot(first, second)) return std::nullopt;
  MicroBatchProfile profile;
  profile.steps_ = steps;
  profile.events_ = first.events;
  profile.operation_starts_ = first.starts;
  for (size_t i = 0; i < first.sizes.size(); ++i) {
    const bool grows = b.size > a.size;
    const double small = grows ? first.sizes[i] : second.sizes[i];
    const double large = grows ? second.sizes[i] : first.sizes[i];
    const auto samples = static_cast<double>(std::max(a.size, b.size));
    // A rounded block may be shorter by all but one byte of the rounding: the steepest line that
    // could be meant.
    double slope = (large - small + static_cast<double>(rounding - 1)) /
                   static_cast<double>(std::abs(b.size - a.size));
    if (rounding > 1) slope = std::min(slope, large / samples);
    profile.blocks_.push_back({large - slope * samples, slope});
  }
  for (size_t i = 0; i < profile.events_.size(); ++i) {
    // Which gradients became their buffers shows in whichever trace came first.
    profile.events_[i].taken_over = first.events[i].taken_over || second.events[i].taken_over;
    if (!profile.events_[i].again) profile.buffer_bytes_ += profile.events_[i].buffer_bytes;
  }
  return profile;
}

std::optional<MicroBatchProfile> MicroBatchProfile::fit(const MicroBatchTrace& a,
                                                        const MicroBatchTrace& b) {
  return fit(a, b, {stream_operations().begin(), stream_operations().end()});
}

MicroBatchProfile::Effect MicroBatchProfile::effect(Step step, double samples, bool first) const {
  auto place = std::find(steps_.begin(), steps_.end(), step);
  if (place == steps_.end() && step.again) {
    step.again = false;
    place = std::find(steps_.begin(), steps_.end(), step);
  }
  if (place == steps_.end()) return {};
  const auto index = static_cast<size_t>(place - steps_.begin());
  const size_t begin = operation_starts_[index];
  const size_t end =
      index + 1 < operation_starts_.size() ? operation_starts_[index + 1] : events_.size();
  double live = 0;
  double rise = 0;
  for (size_t i = begin; i < end; ++i) {
    const ProfileEvent& event = events_[i];
    const double bytes = std::max(0.0, blocks_[event.block].at(samples));
    switch (event.kind) {
      case ProfileEvent::Kind::allocate:
        live += bytes;
        break;
      case ProfileEvent::Kind::free:
        live -= bytes;
        break;
      case ProfileEvent::Kind::gradient:
        if (!first || event.again) {
          live -= bytes;
        } else if (!event.taken_over) {
          live += static_cast<double>(event.buffer_bytes);
          rise = std::max(rise, live);
          live -= bytes;
        }
        break;
    }
    rise = std::max(rise, live);
  }
  return {static_cast<int64_t>(std::llround(rise)), static_cast<int64_t>(std::llround(live))};
}

}  // namespace infinitybatch
