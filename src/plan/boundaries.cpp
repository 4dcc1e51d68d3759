#include "plan/boundaries.hpp"

#include <algorithm>
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

/// Adds a way, unless another one is no worse in both; those that are no better in either go. Ways
/// on from here must not have begun.
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

/// Bytes that ops of a segment make.
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

/// One for each segment; shares of their sum.
std::vector<double> shares_of(std::vector<double> work) {
  double all = 0;
  for (const double each : work) all += each;
  const double none = 1.0 / static_cast<double>(work.size());
  for (double& each : work) each = all > 0 ? each / all : none;
  return work;
}

}  // namespace

Boundaries::Boundaries(const Recorded& recorded, int64_t samples, bool coupled)
    : ops_(static_cast<int64_t>(recorded.segments.size()) - 1), coupled_(coupled) {
  std::vector<double> work;
  for (int64_t s = 0; s <= ops_; ++s) {
    const tape::Segment& segment = recorded.segments[static_cast<size_t>(s)];
    work.push_back(made_by(recorded.tape, segment));
    note_given(recorded, s, samples);
  }
  work_ = made_ = shares_of(std::move(work));
  for (int64_t beside = 0; beside <= ops_; ++beside) {
    std::vector<double>& row = added_.emplace_back(static_cast<size_t>(ops_) + 1);
    for (const Given& each : given_) {
      for (int64_t at = each.giver + 1; at <= each.last && beside <= each.giver; ++at) {
        row[static_cast<size_t>(at)] += each.bytes;
      }
    }
  }
  for (int64_t begin = 0; begin < end(); ++begin) {
    std::vector<Block>& row = blocks_.emplace_back();
    for (int64_t last = begin + 1; last <= end(); ++last) row.push_back(block(begin, last));
  }
}

void Boundaries::note_given(const Recorded& recorded, int64_t segment, int64_t samples) {
  const tape::Tape& tape = recorded.tape;
  std::map<uint32_t, Given> by_memory;
  for (const tape::ValueId value : recorded.segments[static_cast<size_t>(segment)].gives) {
    const auto users = recorded.users.find({value, static_cast<int32_t>(segment)});
    const uint32_t memory = tape.memories[value];
    if (users == recorded.users.end() || memory == tape::kNoMemory) continue;
    const double bytes =
        static_cast<double>(tape.memory_bytes[memory]) / static_cast<double>(samples);
    const Given given{segment, users->second.front(), users->second.back(), bytes};
    Given& known = by_memory.try_emplace(memory, given).first->second;
    known.first = std::min(known.first, given.first);
    known.last = std::max(known.last, given.last);
  }
  for (const auto& [memory, given] : by_memory) given_.push_back(given);
}

void Boundaries::learn(const std::map<int64_t, double>& seconds) {
  for (const auto& [segment, taken] : seconds) {
    if (segment > ops_) return;  // another program's
    const auto known = seconds_.try_emplace(segment, taken).first;
    known->second = std::min(known->second, taken);
  }
  // With a separable loss nobody goes through the last segment by itself.
  if (static_cast<int64_t>(seconds_.size()) < end()) return;
  std::vector<double> work;
  for (const auto& [segment, taken] : seconds_) work.push_back(taken);
  work = shares_of(std::move(work));
  const double timed = coupled_ ? 1.0 : 1.0 - work_.back();
  for (size_t s = 0; s < work.size(); ++s) work_[s] = timed * work[s];
}

double Boundaries::again(const std::vector<double>& work, int64_t begin, int64_t end) {
  double more = 0;
  for (int64_t s = begin; s + 1 < end; ++s) more += work[static_cast<size_t>(s)];
  return more;
}

Boundaries::Block Boundaries::block(int64_t begin, int64_t end) const {
  const auto added = [this](int64_t beside, int64_t at) {
    return at <= ops_ ? added_[static_cast<size_t>(beside)][static_cast<size_t>(at)] : 0.0;
  };
  Block block;
  block.kept = added(begin, end);
  // Forward: of each micro-batch one boundary behind the one that is kept.
  for (int64_t at = begin + 1; at <= end; ++at) {
    block.beside = std::max(block.beside, added(begin, at));
  }
  // Back, through one segment after the other: what those in front of it gave, and gradients in
  // front of the op behind it, which give way to those in front of it. What the last segment of the
  // block takes is there for one micro-batch at a time.
  const int64_t top = end - 1;
  std::vector<double> made(static_cast<size_t>(end - begin));
  for (const Given& each : given_) {
    if (each.giver < begin || each.giver + 1 >= top || each.first > top) continue;
    made[static_cast<size_t>(each.giver - begin)] += each.bytes;
  }
  double waiting = 0;
  for (int64_t at = begin; at <= top; ++at) {
    block.beside = std::max(block.beside, waiting + added(0, at + 1));
    if (at == top && at > begin) block.beside = std::max(block.beside, waiting + added(0, at));
    waiting += made[static_cast<size_t>(at - begin)];
  }
  return block;
}

Boundaries::Choice Boundaries::with(const KeptBoundaries& kept, int64_t samples) const {
  Choice choice;
  choice.kept = kept;
  double below = 0;
  double most = 0;
  int64_t from = 0;
  for (int64_t to = 1; to <= end(); ++to) {
    const bool is_kept = !kept || std::binary_search(kept->begin(), kept->end(), to);
    if (!is_kept && to < end()) continue;
    const Block& block = blocks_[static_cast<size_t>(from)][static_cast<size_t>(to - from - 1)];
    most = std::max(most, below + block.beside);
    below += block.kept;
    choice.again += again(work_, from, to);
    from = to;
  }
  choice.bytes = static_cast<int64_t>(most * static_cast<double>(samples));
  return choice;
}

Boundaries::Choice Boundaries::least(int64_t samples) const {
  Choice least = with(/*kept=*/std::nullopt, samples);
  int64_t enough = least.bytes;
  int64_t too_few = 0;
  while (enough - too_few > 1) {
    const int64_t middle = too_few + (enough - too_few) / 2;
    if (auto choice = within(middle, samples, made_)) {
      least = std::move(*choice);
      enough = middle;
    } else {
      too_few = middle;
    }
  }
  return least;
}

std::optional<Boundaries::Choice> Boundaries::within(int64_t bytes, int64_t samples) const {
  return within(bytes, samples, work_);
}

std::optional<Boundaries::Choice> Boundaries::within(int64_t bytes, int64_t samples,
                                                     const std::vector<double>& work) const {
  if (end() == 0) return std::nullopt;
  const double most = static_cast<double>(bytes) / static_cast<double>(samples);
  std::vector<std::vector<Way>> ways(static_cast<size_t>(end()) + 1);
  ways[0].push_back({});
  for (int64_t from = 0; from < end(); ++from) {
    const std::vector<Way>& here = ways[static_cast<size_t>(from)];
    for (int64_t to = from + 1; to <= end() && !here.empty(); ++to) {
      const Block& block = blocks_[static_cast<size_t>(from)][static_cast<size_t>(to - from - 1)];
      const double more = again(work, from, to);
      for (size_t i = 0; i < here.size(); ++i) {
        if (here[i].bytes + block.beside > most) continue;
        const Way way{here[i].bytes + block.kept, here[i].again + more, from, i};
        add(ways[static_cast<size_t>(to)], way);
      }
    }
  }
  const std::vector<Way>& arrived = ways.back();
  if (arrived.empty()) return std::nullopt;
  const Way* way = &*std::min_element(arrived.begin(), arrived.end(),
                                      [](const Way& a, const Way& b) { return a.again < b.again; });
  std::vector<int64_t> kept;
  for (; way->from > 0; way = &ways[static_cast<size_t>(way->from)][way->before]) {
    kept.push_back(way->from);
  }
  std::reverse(kept.begin(), kept.end());
  const bool all = static_cast<int64_t>(kept.size()) + 1 == end();
  return with(all ? std::nullopt : KeptBoundaries(std::move(kept)), samples);
}

}  // namespace infinitybatch::plan
