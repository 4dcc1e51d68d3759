#include "plan/plans.hpp"

#include "execute/schedule.hpp"

#include <algorithm>
#include <utility>

namespace infinitybatch::plan {

Plan measured_plan(const Request& request, std::vector<int64_t> sizes, int64_t row) {
  std::vector<int64_t> lengths = request.lengths_of(sizes, row);
  Plan plan;
  if (!request.two_pass) {
    plan = stream_plan(std::move(sizes), /*penalty=*/false);
  } else if (request.segments > 0) {
    plan = cut_rehearsal_plan(std::move(sizes), request.segments, request.whole_loss, request.kept);
  } else {
    plan = rehearsal_plan(std::move(sizes), request.offloads_graphs);
  }
  if (request.two_pass && request.offloaded)
    plan = with_offload(std::move(plan), /*overlap=*/false);
  plan.lengths = std::move(lengths);
  return plan;
}

Plan streamed_plan(const Request& request, int64_t size, bool penalty) {
  std::vector<int64_t> sizes = request.split(size);
  std::vector<int64_t> lengths = request.lengths_of(sizes);
  Plan plan = stream_plan(std::move(sizes), penalty);
  plan.lengths = std::move(lengths);
  return plan;
}

size_t probed_micro_batches(const Request& request) {
  constexpr int64_t kRows = 8;  // two of the larger probe
  return request.segments > 0 && request.batch_size >= kRows ? 2 : 1;
}

namespace {

/// The last micro-batches that have so many rows; what ends within one makes it two.
int64_t last_ones_of(int64_t rows, std::vector<int64_t>& sizes) {
  int64_t count = 0;
  auto size = sizes.end();
  for (; rows > 0 && rows >= size[-1]; ++count) rows -= *--size;
  if (rows == 0) return count;
  size[-1] -= rows;
  sizes.insert(size, rows);
  return count + 1;
}

}  // namespace

Plan two_pass_plan(const Request& request, int64_t size, int64_t kept, bool overlap) {
  std::vector<int64_t> sizes = request.split(size);
  const int64_t retained = request.offloads_graphs ? std::ssize(sizes) : last_ones_of(kept, sizes);
  std::vector<int64_t> lengths = request.lengths_of(sizes);
  Plan plan = request.segments == 0 ? infinitybatch::two_pass_plan(std::move(sizes), retained,
                                                                   request.offloads_graphs)
                                    : cut_plan(std::move(sizes), request.segments, retained,
                                               request.whole_loss, request.penalty, request.kept);
  if (!request.goes_back) {
    const auto is_loss = [](const Instruction& each) {
      return each.operation == Operation::whole_loss;
    };
    auto& instructions = plan.instructions;
    const auto loss = std::find_if(instructions.begin(), instructions.end(), is_loss);
    instructions.erase(loss + 1, instructions.end());
  }
  if (request.offloaded) plan = with_offload(std::move(plan), overlap);
  plan.lengths = std::move(lengths);
  return plan;
}

}  // namespace infinitybatch::plan
