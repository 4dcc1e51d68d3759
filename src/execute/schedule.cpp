#include "execute/schedule.hpp"

#include <algorithm>
#include <utility>

namespace infinitybatch {

std::vector<int64_t> split_by(int64_t batch_size, int64_t size) {
  std::vector<int64_t> sizes(static_cast<size_t>(batch_size / size), size);
  if (batch_size % size != 0) sizes.push_back(batch_size % size);
  return sizes;
}

std::vector<int64_t> split_evenly(int64_t batch_size, int64_t size) {
  const int64_t count = (batch_size + size - 1) / size;
  std::vector<int64_t> sizes(static_cast<size_t>(count), batch_size / count);
  for (int64_t i = 0; i < batch_size % count; ++i) ++sizes[static_cast<size_t>(i)];
  return sizes;
}

std::vector<int64_t> split_for_cuts(int64_t batch_size, int64_t size) {
  const bool single = size > 2 && batch_size > size && batch_size % size == 1;
  return single ? split_evenly(batch_size, size) : split_by(batch_size, size);
}

const std::vector<Operation>& stream_operations() {
  static const std::vector<Operation> operations{
      Operation::load, Operation::forward, Operation::loss, Operation::backward, Operation::free};
  return operations;
}

namespace {

/// What a plan consists of, whatever the strategy: micro-batches are recorded, go from one op of
/// the whole batch to the next together, have their loss, and go back.
struct Shape {
  std::vector<int64_t> sizes;
  std::vector<Stretches> stretches = {};  ///< of each micro-batch's tape; empty: it is not cut
  bool records = true;                    ///< false: forward runs with its graph, once
  bool coupled = false;                   ///< the loss is that of all outputs
  bool apart = false;                     ///< each micro-batch goes to its end before the next
  bool waits_at_cuts = false;             ///< recordings end at the last cut: nobody advances there
  bool rehearses = false;                 ///< without the loss of all and the hand-out
  bool penalty = false;
  int64_t retained = 0;
  KeptBoundaries kept = {};  ///< of cut tapes without cuts for memory
};

/// The only one who makes instructions, but for those of offload.
class Schedule {
 public:
  explicit Schedule(Shape shape) : shape_(std::move(shape)), count_(std::ssize(shape_.sizes)) {}

  Plan build(const char* strategy) {
    Plan plan;
    plan.strategy = strategy;
    plan.retained = shape_.retained;
    plan.kept_boundaries = shape_.kept;
    plan.batch_size = std::accumulate(shape_.sizes.begin(), shape_.sizes.end(), int64_t{0});
    if (is_cut()) plan.segments = 0;
    instructions_.reserve(shape_.sizes.size() * 6 + 2);  // a plan is made in each step
    for (const Stretches& each : shape_.stretches) {
      plan.segments = std::max(plan.segments, each.back());
    }
    for (int64_t i = 0; shape_.apart && i < count_; ++i) go(i, i + 1);
    if (!shape_.apart) go(0, count_);
    if (shape_.penalty) add(Operation::penalty);
    if (!shape_.rehearses) add(Operation::hand_out);
    plan.instructions = std::move(instructions_);
    plan.micro_batch_sizes = std::move(shape_.sizes);
    return plan;
  }

 private:
  bool is_cut() const { return !shape_.stretches.empty(); }
  bool retains(int64_t i) const { return i >= count_ - shape_.retained; }
  int64_t last_stretch() const { return is_cut() ? std::ssize(shape_.stretches.front()) - 1 : 0; }
  /// Behind the last segment of a stretch.
  int64_t end_of(int64_t i, int64_t stretch) const {
    if (stretch < 0) return 0;
    return shape_.stretches[static_cast<size_t>(i)][static_cast<size_t>(stretch)];
  }

  /// Whether what all micro-batches save in front of a stretch waits for their way back.
  bool keeps(int64_t stretch) const {
    if (!shape_.kept || stretch == 0) return true;
    return std::binary_search(shape_.kept->begin(), shape_.kept->end(), stretch);
  }

  void add(Operation operation, int64_t micro_batch = -1, int64_t segment = -1) {
    instructions_.push_back({operation, micro_batch, segment});
  }

  /// These micro-batches, from their inputs to their gradients.
  void go(int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end && shape_.records; ++i) {
      add(!is_cut() && retains(i) ? Operation::retain : Operation::record, i);
    }
    const int64_t last = last_stretch();
    for (int64_t stretch = 0; stretch < last; ++stretch) {
      advance(begin, end, stretch);
      add(Operation::combine, -1, stretch + 1);
    }
    if (shape_.coupled && is_cut() && !shape_.waits_at_cuts) advance(begin, end, last);
    if (shape_.coupled && !shape_.rehearses) add(Operation::whole_loss);
    for (int64_t stretch = last; stretch >= 0; --stretch) {
      // A separable loss needs nothing of the whole batch after the last op: forward and backward.
      const bool streams = stretch == last && !shape_.coupled;
      for (int64_t k = begin; k < end; ++k) {
        const int64_t i = streams ? k : end - 1 - (k - begin);
        is_cut() ? go_back(i, stretch, streams) : visit(i, -1, /*last=*/true, streams);
      }
      if (stretch > 0) add(Operation::combine_gradients, -1, stretch);
    }
  }

  void advance(int64_t begin, int64_t end, int64_t stretch) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t s = end_of(i, stretch - 1); s < end_of(i, stretch); ++s) {
        add(retains(i) ? Operation::advance_retained : Operation::advance, i, s);
        instructions_.back().leaves = !keeps(stretch);
      }
    }
  }

  void go_back(int64_t i, int64_t stretch, bool streams) {
    const int64_t end = end_of(i, stretch);
    const bool of_loss = stretch == last_stretch();
    if (ends_block(stretch, streams)) recompute(i, stretch);
    for (int64_t s = end; s-- > end_of(i, stretch - 1);) {
      visit(i, s, of_loss && s + 1 == end, streams);
    }
  }

  /// Whether nobody has gone from the boundary that is kept in front of a stretch to the stretch
  /// since. At the last one of a stream all have just arrived.
  bool ends_block(int64_t stretch, bool streams) const {
    if (keeps(stretch) || streams) return false;
    const bool behind_is_at_once = stretch + 1 == last_stretch() && !shape_.coupled;
    return stretch == last_stretch() || behind_is_at_once || keeps(stretch + 1);
  }

  void recompute(int64_t i, int64_t stretch) {
    int64_t from = stretch;
    while (!keeps(from)) --from;
    for (int64_t s = from; s < stretch; ++s) add(Operation::recompute, i, s);
  }

  /// A segment, or the whole, with its graph.
  /// \param last the loss comes next
  void visit(int64_t i, int64_t segment, bool last, bool streams) {
    if (!shape_.records) {
      add(Operation::load, i);
      add(Operation::forward, i);
    } else {
      add(is_cut() ? Operation::resume : Operation::replay, i, segment);
    }
    if (last && streams) add(Operation::loss, i);
    if (last && shape_.coupled && shape_.rehearses) add(Operation::seed, i, segment);
    add(Operation::backward, i, segment);
    add(Operation::free, i, segment);
  }

  Shape shape_;
  int64_t count_;
  std::vector<Instruction> instructions_;
};

}  // namespace

Plan stream_plan(std::vector<int64_t> micro_batch_sizes, bool penalty) {
  return Schedule({.sizes = std::move(micro_batch_sizes),
                   .records = false,
                   .apart = true,
                   .penalty = penalty})
      .build("stream");
}

Plan two_pass_plan(std::vector<int64_t> micro_batch_sizes, int64_t retained, bool offloads_graphs) {
  Plan plan =
      Schedule({.sizes = std::move(micro_batch_sizes), .coupled = true, .retained = retained})
          .build("replay");
  plan.offloads_graphs = offloads_graphs && retained > 0;
  return plan;
}

Plan rehearsal_plan(std::vector<int64_t> micro_batch_sizes, bool offloads_graphs) {
  const int64_t retained = offloads_graphs ? std::ssize(micro_batch_sizes) : 0;
  Plan plan = Schedule({.sizes = std::move(micro_batch_sizes),
                        .coupled = true,
                        .apart = true,
                        .rehearses = true,
                        .retained = retained})
                  .build("rehearsal");
  plan.offloads_graphs = offloads_graphs;
  return plan;
}

Plan cut_plan(std::vector<int64_t> micro_batch_sizes, const std::vector<Stretches>& stretches,
              int64_t retained, bool coupled, bool penalty) {
  const auto without_memory = std::ssize(stretches.front());
  Plan plan = Schedule({.sizes = std::move(micro_batch_sizes),
                        .stretches = stretches,
                        .coupled = coupled,
                        .penalty = penalty,
                        .retained = retained})
                  .build("cut");
  if (plan.segments > without_memory) plan.strategy = "checkpoint";
  return plan;
}

namespace {

/// Without cuts for memory.
std::vector<Stretches> stretches_of(size_t micro_batches, int64_t segments) {
  Stretches stretches(static_cast<size_t>(segments));
  std::iota(stretches.begin(), stretches.end(), int64_t{1});
  return std::vector<Stretches>(micro_batches, stretches);
}

}  // namespace

Plan cut_plan(std::vector<int64_t> micro_batch_sizes, int64_t segments, int64_t retained,
              bool coupled, bool penalty, const KeptBoundaries& kept) {
  const auto stretches = stretches_of(micro_batch_sizes.size(), segments);
  return Schedule({.sizes = std::move(micro_batch_sizes),
                   .stretches = stretches,
                   .coupled = coupled,
                   .penalty = penalty,
                   .retained = kept ? 0 : retained,
                   .kept = kept})
      .build("cut");
}

Plan cut_rehearsal_plan(std::vector<int64_t> micro_batch_sizes, int64_t segments, bool coupled,
                        const KeptBoundaries& kept) {
  const auto stretches = stretches_of(micro_batch_sizes.size(), segments);
  return Schedule({.sizes = std::move(micro_batch_sizes),
                   .stretches = stretches,
                   .coupled = coupled,
                   .rehearses = true,
                   .kept = kept})
      .build("rehearsal");
}

Plan checkpoint_plan(std::vector<int64_t> micro_batch_sizes, const std::vector<int64_t>& segments,
                     bool coupled, bool penalty) {
  std::vector<Stretches> stretches;
  for (const int64_t each : segments) stretches.push_back({each});
  return Schedule({.sizes = std::move(micro_batch_sizes),
                   .stretches = std::move(stretches),
                   .coupled = coupled,
                   .apart = !coupled,
                   .waits_at_cuts = true,
                   .penalty = penalty})
      .build("checkpoint");
}

}  // namespace infinitybatch
