#include <infinitybatch/execute/profile.hpp>

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
    for (const auto& mark : trace.sinks) {
      if (mark.what.buffer != mark.what.gradient) buffers_.insert(mark.what.buffer);
    }
  }

  Story tell() {
    size_t sink = 0;
    size_t operation = 0;
    for (size_t i = 0; i <= trace_.events.size(); ++i) {
      for (; sink < trace_.sinks.size() && trace_.sinks[sink].event <= i; ++sink) {
        gradient(trace_.sinks[sink].what);
      }
      for (; operation < trace_.operation_starts.size() && trace_.operation_starts[operation] <= i;
           ++operation) {
        story_.starts.push_back(story_.events.size());
      }
      if (i < trace_.events.size()) happen(trace_.events[i]);
    }
    return std::move(story_);
  }

 private:
  void happen(const memory::AllocationEvent& event) {
    if (event.bytes > 0) {
      // A buffer made inside a sink belongs to the gradient's own event.
      if (buffers_.contains(event.address)) {
        live_.erase(event.address);
        return;
      }
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

  void gradient(const autograd::SinkEvent& event) {
    const auto found = live_.find(event.gradient);
    if (found == live_.end()) return;  // a view, or sparse: freed like any other block
    given_.insert(found->second);
    story_.events.push_back({ProfileEvent::Kind::gradient, found->second, event.buffer_bytes,
                             event.buffer == event.gradient});
  }

  const MicroBatchTrace& trace_;
  std::unordered_set<const void*> buffers_;
  std::unordered_map<const void*, uint32_t> live_;
  std::unordered_set<uint32_t> given_;
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

std::optional<MicroBatchProfile> MicroBatchProfile::fit(const MicroBatchTrace& a,
                                                        const MicroBatchTrace& b,
                                                        const std::vector<Operation>& operations) {
  const Story first = StoryTeller(a).tell();
  const Story second = StoryTeller(b).tell();
  if (a.size == b.size || !same_plot(first, second)) return std::nullopt;
  MicroBatchProfile profile;
  profile.operations_ = operations;
  profile.events_ = first.events;
  profile.operation_starts_ = first.starts;
  for (size_t i = 0; i < first.sizes.size(); ++i) {
    const double slope = (second.sizes[i] - first.sizes[i]) / static_cast<double>(b.size - a.size);
    profile.blocks_.push_back({first.sizes[i] - slope * static_cast<double>(a.size), slope});
  }
  for (size_t i = 0; i < profile.events_.size(); ++i) {
    // Which gradients became their buffers shows in whichever trace came first.
    profile.events_[i].taken_over = first.events[i].taken_over || second.events[i].taken_over;
    profile.buffer_bytes_ += profile.events_[i].buffer_bytes;
  }
  return profile;
}

MicroBatchProfile::Effect MicroBatchProfile::effect(Operation operation, int64_t samples,
                                                    bool first) const {
  const auto place = std::find(operations_.begin(), operations_.end(), operation);
  if (place == operations_.end()) return {};
  const auto index = static_cast<size_t>(place - operations_.begin());
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
        if (!first) {
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
