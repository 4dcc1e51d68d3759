#include "plan/boundaries.hpp"

#include <algorithm>
#include <map>
#include <utility>

namespace infinitybatch::plan {
namespace {

/// A way from the inputs to a boundary that is kept.
struct Way {
  double bytes = 0;  // kept, of one sample
  double again = 0;
  int64_t from = 0;   // the boundary that is kept in front of it
  size_t before = 0;  // index of the way there
};

/// Adds a way, unless another one is no worse in both; those that are worse in both go.
/// Indices of ways that others came from must stay, so nothing is added once somebody has.
void add(std::vector<Way>& ways, const Way& way) {
  const auto no_worse = [](const Way& a, const Way& b) {
    return a.bytes <= b.bytes && a.again <= b.again;
  };
  for (const Way& each : ways) {
    if (no_worse(each, way)) return;
  }
  std::erase_if(ways, [&](const Way& each) { return no_worse(way, each); });
  ways.push_back(way);
}

/// Bytes that ops of a segment make: what it takes to compute them is known no better.
double made_by(const tape::Tape& tape, const tape::Segment& segment) {
  double bytes = 0;
  for (uint32_t i = segment.ops.begin; i < segment.ops.end; ++i) {
    const tape::Op& op = tape.ops[i];
    for (uint32_t o = op.outputs.begin; o < op.outputs.end; ++o) {
      const tape::ValueId value = tape.outputs[o];
      if (value == tape::kNoValue || tape.memories[value] == tape::kNoMemory) continue;
      bytes += static_cast<double>(tape.memory_bytes[tape.memories[value]]);
    }
  }
  return bytes;
}

}  // namespace

Boundaries::Boundaries(const Recorded& recorded, int64_t samples, bool coupled)
    : ops_(static_cast<int64_t>(recorded.segments.size()) - 1), coupled_(coupled) {
  const tape::Tape& tape = recorded.tape;
  const int64_t segments = ops_ + 1;
  double all = 0;
  for (int64_t s = 0; s < segments; ++s) {
    const tape::Segment& segment = recorded.segments[static_cast<size_t>(s)];
    work_.push_back(made_by(tape, segment));
    all += work_.back();
    std::map<uint32_t, Given> by_memory;
    for (const tape::ValueId value : segment.gives) {
      const auto users = recorded.users.find({value, static_cast<int32_t>(s)});
      const uint32_t memory = tape.memories[value];
      if (users == recorded.users.end() || memory == tape::kNoMemory) continue;
      const double bytes =
          static_cast<double>(tape.memory_bytes[memory]) / static_cast<double>(samples);
      Given& given =
          by_memory.try_emplace(memory, Given{s, users->second.front(), 0, bytes}).first->second;
      given.first = std::min(given.first, users->second.front());
      given.last = std::max(given.last, users->second.back());
    }
    for (const auto& [memory, given] : by_memory) given_.push_back(given);
  }
  for (double& work : work_) work = all > 0 ? work / all : 1.0 / static_cast<double>(segments);
  for (int64_t begin = 0; begin < end(); ++begin) {
    std::vector<Block>& row = blocks_.emplace_back();
    for (int64_t last = begin + 1; last <= end(); ++last) row.push_back(block(begin, last));
  }
}

double Boundaries::added(int64_t beside, int64_t at) const {
  double bytes = 0;
  for (const Given& each : given_) {
    if (beside <= each.giver && each.giver < at && at <= each.last) bytes += each.bytes;
  }
  return bytes;
}

Boundaries::Block Boundaries::block(int64_t begin, int64_t end) const {
  Block block;
  const bool to_the_end = end > ops_;
  if (!to_the_end) block.kept = added(begin, end);
  // Forward: of each micro-batch one boundary behind the one that is kept.
  for (int64_t at = begin + 1; at <= std::min(end, ops_); ++at) {
    block.beside = std::max(block.beside, added(begin, at));
  }
  // Back: what the block's segments in front of `at` gave, and gradients in front of the op behind
  // it. What its last segment takes is there for one micro-batch at a time.
  const int64_t top = end - 1;
  double waiting = 0;
  for (int64_t at = begin; at <= top; ++at) {
    const double gradients = at < ops_ ? added(0, at + 1) : 0;
    block.beside = std::max(block.beside, waiting + gradients);
    if (at == top) break;
    block.again += work_[static_cast<size_t>(at)];
    if (at + 1 == top) {
      block.beside = std::max(block.beside, waiting + added(0, top));
      continue;
    }
    for (const Given& each : given_) {
      if (each.giver == at && each.first <= top) waiting += each.bytes;
    }
  }
  return block;
}

Boundaries::Choice Boundaries::all(int64_t samples) const {
  Choice choice;
  double kept = 0;
  double most = 0;
  for (int64_t at = 0; at < end(); ++at) {
    const Block& block = blocks_[static_cast<size_t>(at)].front();
    most = std::max(most, kept + block.beside);
    kept += block.kept;
  }
  choice.bytes = static_cast<int64_t>(most * static_cast<double>(samples));
  return choice;
}

Boundaries::Choice Boundaries::least(int64_t samples) const {
  Choice least = all(samples);
  int64_t too_few = 0;
  while (least.bytes - too_few > least.bytes / 1024 + 1) {
    const int64_t middle = too_few + (least.bytes - too_few) / 2;
    if (auto choice = within(middle, samples)) {
      least = std::move(*choice);
    } else {
      too_few = middle;
    }
  }
  return least;
}

std::optional<Boundaries::Choice> Boundaries::within(int64_t bytes, int64_t samples) const {
  const double most = static_cast<double>(bytes) / static_cast<double>(samples);
  std::vector<std::vector<Way>> ways(static_cast<size_t>(end()) + 1);
  ways[0].push_back({});
  for (int64_t from = 0; from < end(); ++from) {
    const std::vector<Way>& here = ways[static_cast<size_t>(from)];
    for (size_t i = 0; i < here.size(); ++i) {
      for (int64_t to = from + 1; to <= end(); ++to) {
        const auto index = static_cast<size_t>(to - from - 1);
        const Block& block = blocks_[static_cast<size_t>(from)][index];
        if (here[i].bytes + block.beside > most) continue;
        add(ways[static_cast<size_t>(to)],
            {here[i].bytes + block.kept, here[i].again + block.again, from, i});
      }
    }
  }
  const std::vector<Way>& arrived = ways.back();
  if (arrived.empty()) return std::nullopt;
  const Way* way = &*std::min_element(arrived.begin(), arrived.end(),
                                      [](const Way& a, const Way& b) { return a.again < b.again; });
  Choice choice;
  choice.again = way->again;
  std::vector<int64_t> kept;
  double beside = 0;
  int64_t to = end();
  while (to > 0) {
    const int64_t from = way->from;
    const Way& before = ways[static_cast<size_t>(from)][way->before];
    const auto index = static_cast<size_t>(to - from - 1);
    beside = std::max(beside, before.bytes + blocks_[static_cast<size_t>(from)][index].beside);
    if (from > 0) kept.push_back(from);
    to = from;
    way = &before;
  }
  std::reverse(kept.begin(), kept.end());
  if (static_cast<int64_t>(kept.size()) + 1 < end()) choice.kept = std::move(kept);
  choice.bytes = static_cast<int64_t>(beside * static_cast<double>(samples));
  return choice;
}

}  // namespace infinitybatch::plan
