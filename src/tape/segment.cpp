#include "tape/segment.hpp"

#include "tape/arguments.hpp"

#include <infinitybatch/core/errors.hpp>

#include <algorithm>
#include <map>
#include <set>

namespace infinitybatch::tape {
namespace {

/// Which segments make, use and change what.
class Crossings {
 public:
  Crossings(const Tape& tape, const std::vector<Cut>& cuts)
      : tape_(tape), cuts_(cuts), values_(tape.value_count), segments_(cuts.size() + 1) {
    cut_ops();
    note_uses();
  }

  std::vector<Segment> take() {
    for (ValueId value = 0; value < values_.size(); ++value) cross(value);
    check_aliases();
    find_externals();
    return std::move(segments_);
  }

 private:
  struct Value {
    int32_t maker = kNobody;  // segment; -1: found, and written by the tape
    std::set<int32_t> users;
  };
  static constexpr int32_t kNobody = INT32_MAX;
  static constexpr int32_t kFound = -1;

  void cut_ops() {
    const auto end = static_cast<uint32_t>(tape_.ops.size());
    uint32_t restore = 0;
    for (size_t s = 0; s < segments_.size(); ++s) {
      Segment& segment = segments_[s];
      segment.ops = {s == 0 ? 0 : cuts_[s - 1].op, s == cuts_.size() ? end : cuts_[s].op};
      segment.first_restore = restore;
      for (uint32_t i = segment.ops.begin; i < segment.ops.end; ++i) {
        const Op& op = tape_.ops[i];
        restore += op.facts == nullptr;
        segment.draws = segment.draws || (op.facts != nullptr && op.facts->draws);
      }
    }
  }

  void note_uses() {
    for (const External& external : tape_.externals) {
      externals_.insert(external.value);
      if (external.before.defined()) found_.insert(external.value);
    }
    size_t restore = 0;
    for (size_t s = 0; s < segments_.size(); ++s) {
      Segment& segment = segments_[s];
      for (uint32_t i = segment.ops.begin; i < segment.ops.end; ++i) {
        const Op& op = tape_.ops[i];
        if (op.facts == nullptr) {
          const ValueId value = tape_.restores[restore++].first;
          use(value, s);
          write(value, s, i);
          continue;
        }
        const bool stood_in = s > 0 && i == segment.ops.begin && cuts_[s - 1].stood_in;
        for_each_argument(tape_, op, [&](ValueId value, const Slot& slot) {
          const bool written = op.facts->written[slot.argument];
          if (written && stood_in) {
            segment.settled.push_back(value);
            return;
          }
          use(value, s);
          if (written) write(value, s, i);
        });
        for (uint32_t o = op.outputs.begin; o < op.outputs.end; ++o) {
          const ValueId value = tape_.outputs[o];
          if (value == kNoValue || externals_.count(value) != 0) continue;
          if (values_[value].maker == kNobody) values_[value].maker = static_cast<int32_t>(s);
        }
      }
    }
    for (const ValueId value : tape_.result_values) {
      if (value != kNoValue) use(value, segments_.size() - 1);
    }
  }

  void use(ValueId value, size_t segment) {
    values_[value].users.insert(static_cast<int32_t>(segment));
    if (externals_.count(value) != 0) {
      segments_[segment].externals.push_back(value);
      if (found_.count(value) != 0) values_[value].maker = kFound;
    }
  }

  void write(ValueId value, size_t segment, uint32_t op) {
    const uint32_t memory = tape_.memories[value];
    if (memory == kNoMemory) return;
    writers_[memory].insert(static_cast<int32_t>(segment));
    last_write_[memory] = op;
  }

  bool written_in(ValueId value, int32_t segment) const {
    const auto found = writers_.find(tape_.memories[value]);
    return found != writers_.end() && found->second.count(segment) != 0;
  }

  void cross(ValueId id) {
    const Value& value = values_[id];
    if (value.maker == kNobody) return;  // an external that stays as it is
    for (const int32_t user : value.users) {
      if (user == value.maker) continue;
      int32_t giver = value.maker;
      for (int32_t s = value.maker + 1; s < user; ++s) {
        if (written_in(id, s)) giver = s;
      }
      segments_[static_cast<size_t>(user)].takes.push_back({{id, giver}, written_in(id, user)});
      if (giver < 0) continue;
      auto& gives = segments_[static_cast<size_t>(giver)].gives;
      if (std::find(gives.begin(), gives.end(), id) == gives.end()) gives.push_back(id);
    }
  }

  /// Two values in the same memory wait at a cut as two tensors: a later write into one would not
  /// reach the other.
  void check_aliases() const {
    std::map<uint32_t, std::vector<ValueId>> by_memory;
    for (ValueId id = 0; id < values_.size(); ++id) {
      if (values_[id].maker != kNobody && tape_.memories[id] != kNoMemory) {
        by_memory[tape_.memories[id]].push_back(id);
      }
    }
    for (const auto& [memory, ids] : by_memory) {
      const auto write = last_write_.find(memory);
      if (write == last_write_.end() || ids.size() < 2) continue;
      for (size_t c = 0; c < cuts_.size(); ++c) {
        if (write->second < cuts_[c].op) continue;
        const auto segment = static_cast<int32_t>(c);
        const auto waiting = std::count_if(ids.begin(), ids.end(), [&](ValueId id) {
          const Value& value = values_[id];
          return value.maker <= segment && !value.users.empty() && *value.users.rbegin() > segment;
        });
        if (waiting > 1) {
          const OpFacts* facts = tape_.ops[write->second].facts;
          throw Unsupported("a tensor and a view of it wait at a cut, and " +
                            (facts != nullptr ? facts->name() : std::string("NumPy")) +
                            " changes one of them in place afterwards; write that change out of "
                            "place");
        }
      }
    }
  }

  void find_externals() {
    for (Segment& segment : segments_) {
      std::sort(segment.externals.begin(), segment.externals.end());
      segment.externals.erase(std::unique(segment.externals.begin(), segment.externals.end()),
                              segment.externals.end());
      std::erase_if(segment.externals, [&](ValueId id) { return found_.count(id) != 0; });
    }
    for (const External& external : tape_.externals) {
      if (external.input_leaf < 0) continue;
      for (const int32_t user : values_[external.value].users) {
        segments_[static_cast<size_t>(user)].reads_inputs = true;
      }
    }
  }

  const Tape& tape_;
  const std::vector<Cut>& cuts_;
  std::vector<Value> values_;
  std::vector<Segment> segments_;
  std::set<ValueId> externals_;
  std::set<ValueId> found_;                        // externals that the tape writes
  std::map<uint32_t, std::set<int32_t>> writers_;  // of each memory
  std::map<uint32_t, uint32_t> last_write_;        // op that writes it last
};

}  // namespace

std::vector<Segment> cut(const Tape& tape, const std::vector<Cut>& cuts) {
  return Crossings(tape, cuts).take();
}

}  // namespace infinitybatch::tape
