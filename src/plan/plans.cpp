#include "plan/plans.hpp"

#include "execute/schedule.hpp"

#include <utility>

namespace infinitybatch::plan {

Plan measured_plan(const Request& request, std::vector<int64_t> sizes) {
  if (!request.two_pass) return stream_plan(std::move(sizes), /*penalty=*/false);
  Plan plan = request.segments > 0 ? cut_rehearsal_plan(std::move(sizes), request.segments,
                                                        request.whole_loss, request.kept)
                                   : rehearsal_plan(std::move(sizes), request.offloads_graphs);
  return request.offloaded ? with_offload(std::move(plan), /*overlap=*/false) : plan;
}

size_t probed_micro_batches(const Request& request) {
  constexpr int64_t kRows = 8;  // two of the larger probe
  return request.segments > 0 && request.batch_size >= kRows ? 2 : 1;
}

Plan two_pass_plan(const Request& request, int64_t size, int64_t retained, bool overlap) {
  std::vector<int64_t> sizes = split_evenly(request.batch_size, size);
  if (request.offloads_graphs) retained = std::ssize(sizes);
  if (request.kept) retained = 0;
  Plan plan = request.segments == 0 ? infinitybatch::two_pass_plan(std::move(sizes), retained,
                                                                   request.offloads_graphs)
                                    : cut_plan(std::move(sizes), request.segments, retained,
                                               request.whole_loss, request.penalty, request.kept);
  return request.offloaded ? with_offload(std::move(plan), overlap) : plan;
}

}  // namespace infinitybatch::plan
