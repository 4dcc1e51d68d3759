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
      for (;;) {
        const bool sinks = sink < trace_.sinks.size() && trace_.sinks[sink].event <= i;
        // Several operations begin here where nothing is allocated in between.
        if (sinks && trace_.sinks[sink].operations <= operation) {
          gradient(trace_.sinks[sink++]);
        } else if (operation < trace_.operation_starts.size() &&
                   trace_.operation_starts[operation] <= i) {
          story_.starts.push_back(story_.events.size());
          ++operation;
        } else {
          break;
        }
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
    uint32_t block = ProfileEvent::kNoBlock;
    if (!event.product) {
      const auto found = live_.find(event.gradient);
      if (found == live_.end()) return;  // a view, or sparse: freed like any other block
      block = found->second;
      given_.insert(block);
    }
    // A parameter that several segments use has one buffer.
    const bool again = !seen_.insert(event.buffer).second;
    story_.events.push_back(
        {ProfileEvent::Kind::gradient, block, event.buffer_bytes, mark.taken_over(), again});
  }

  const MicroBatchTrace& trace_;
  std::unordered_set<size_t> buffers_;  // events
  std::unordered_map<const void*, uint32_t> live_;
  std::unordered_set<uint32_t> given_;
  std::unordered_set<const void*> seen_;  // buffers that a gradient has met
  Story story_;
};

bool same_events(const std::vector<ProfileEvent>& a, const std::vector<ProfileEvent>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const ProfileEvent& x, const ProfileEvent& y) {
                      return x.kind == y.kind && x.block == y.block;
                    });
}

bool same_plot(const Story& a, const Story& b) {
  return a.sizes.size() == b.sizes.size() && a.starts == b.starts &&
         same_events(a.events, b.events);
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
  const bool comparable = a.size != b.size && a.length == b.length;
  if (!comparable || !same_plot(first, second)) return std::nullopt;
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
  if (a.length > 0) profile.tell_length(a.length);
  return profile;
}

std::optional<MicroBatchProfile> MicroBatchProfile::fit(const MicroBatchTrace& a,
                                                        const MicroBatchTrace& b) {
  return fit(a, b, {stream_operations().begin(), stream_operations().end()});
}

void MicroBatchProfile::tell_length(int64_t length) {
  length_ = length;
  known_ = {{length, std::vector<double>(blocks_.size(), 1.0)}};
}

bool MicroBatchProfile::learn(const MicroBatchTrace& trace) {
  if (known_.empty() || trace.length <= 0) return false;
  const Story story = StoryTeller(trace).tell();
  if (story.sizes.size() != blocks_.size() || story.starts != operation_starts_ ||
      !same_events(story.events, events_)) {
    return false;
  }
  Known known{trace.length, {}};
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const double expected = blocks_[i].at(static_cast<double>(trace.size));
    known.ratios.push_back(expected > 0 ? story.sizes[i] / expected : 1.0);
  }
  const auto place =
      std::lower_bound(known_.begin(), known_.end(), trace.length,
                       [](const Known& each, int64_t length) { return each.length < length; });
  if (place != known_.end() && place->length == trace.length) {
    *place = std::move(known);  // what was measured last counts
  } else {
    known_.insert(place, std::move(known));
  }
  return true;
}

std::vector<int64_t> MicroBatchProfile::lengths() const {
  std::vector<int64_t> lengths;
  for (const Known& known : known_) lengths.push_back(known.length);
  return lengths;
}

std::vector<MicroBatchProfile::Share> MicroBatchProfile::shares_at(int64_t length) const {
  if (known_.empty() || length == 0 || length == length_) return {};
  const auto square = [](int64_t of) { return static_cast<double>(of) * static_cast<double>(of); };
  const auto above = static_cast<size_t>(
      std::lower_bound(known_.begin(), known_.end(), length,
                       [](const Known& each, int64_t of) { return each.length < of; }) -
      known_.begin());
  if (above < known_.size() && known_[above].length == length) return {{&known_[above], 1.0}};
  const Known& first = known_.front();
  if (known_.size() == 1) {
    // What grows with the length grows with its square at most, and what is shorter takes no more.
    return {{&first, length < first.length ? 1.0 : square(length) / square(first.length)}};
  }
  if (known_.size() == 2) {
    const Known& last = known_.back();
    // Between the two a chord is above every parabola that rises; outside one without a linear part
    // is.
    const bool between = above == 1;
    const auto at = [&](int64_t of) { return between ? static_cast<double>(of) : square(of); };
    const double share = (at(length) - at(first.length)) / (at(last.length) - at(first.length));
    return {{&first, 1.0 - share}, {&last, share}};
  }
  // Of three neighbours, so that a kernel that takes over at some length spoils those near it
  // alone.
  size_t begin = above < 2 ? 0 : above - 2;
  if (above >= 2 && above < known_.size()) {
    const int64_t below = length - known_[above - 2].length;
    const bool nearer_above =
        above + 1 < known_.size() && known_[above + 1].length - length < below;
    if (nearer_above) begin = above - 1;
  }
  begin = std::min(begin, known_.size() - 3);
  std::vector<Share> shares;
  for (size_t i = begin; i < begin + 3; ++i) {
    double weight = 1;
    for (size_t j = begin; j < begin + 3; ++j) {
      if (i == j) continue;
      weight *= static_cast<double>(length - known_[j].length) /
                static_cast<double>(known_[i].length - known_[j].length);
    }
    shares.push_back({&known_[i], weight});
  }
  return shares;
}

double MicroBatchProfile::bytes_of(uint32_t block, double rows,
                                   const std::vector<Share>& shares) const {
  if (block == ProfileEvent::kNoBlock) return 0.0;
  const double bytes = blocks_[block].at(rows);
  if (shares.empty()) return std::max(0.0, bytes);
  double ratio = 0;
  for (const auto& [known, weight] : shares) ratio += weight * known->ratios[block];
  return std::max(0.0, bytes * ratio);
}

std::pair<size_t, size_t> MicroBatchProfile::events_of(Step step) const {
  auto place = std::find(steps_.begin(), steps_.end(), step);
  if (place == steps_.end() && step.again) {
    step.again = false;
    place = std::find(steps_.begin(), steps_.end(), step);
  }
  if (place == steps_.end()) return {0, 0};
  const auto index = static_cast<size_t>(place - steps_.begin());
  const size_t end =
      index + 1 < operation_starts_.size() ? operation_starts_[index + 1] : events_.size();
  return {operation_starts_[index], end};
}

int64_t MicroBatchProfile::largest_block(Step step, RowsAtLength micro_batch) const {
  const std::vector<Share> shares = shares_at(micro_batch.length);
  const auto [begin, end] = events_of(step);
  double most = 0;
  for (size_t i = begin; i < end; ++i) {
    if (events_[i].kind != ProfileEvent::Kind::allocate) continue;
    most = std::max(most, bytes_of(events_[i].block, micro_batch.rows, shares));
  }
  return std::llround(most);
}

int64_t MicroBatchProfile::largest_left(RowsAtLength micro_batch) const {
  std::unordered_set<uint32_t> gone;
  for (const ProfileEvent& event : events_) {
    if (event.kind != ProfileEvent::Kind::allocate) gone.insert(event.block);
  }
  const std::vector<Share> shares = shares_at(micro_batch.length);
  double most = 0;
  for (const ProfileEvent& event : events_) {
    if (gone.contains(event.block)) continue;
    most = std::max(most, bytes_of(event.block, micro_batch.rows, shares));
  }
  return std::llround(most);
}

MicroBatchProfile::Effect MicroBatchProfile::effect(Step step, RowsAtLength micro_batch,
                                                    bool first) const {
  const std::vector<Share> shares = shares_at(micro_batch.length);
  const auto [begin, end] = events_of(step);
  double live = 0;
  double rise = 0;
  for (size_t i = begin; i < end; ++i) {
    const ProfileEvent& event = events_[i];
    const double bytes = bytes_of(event.block, micro_batch.rows, shares);
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
