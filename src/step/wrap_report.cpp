#include "wrap_report.hpp"

#include <utility>

namespace infinitybatch {

std::shared_ptr<WrapReport> report_of(const WrappedCall& call, const std::vector<int64_t>& sizes) {
  auto report = std::make_shared<WrapReport>();
  report->micro_batch_sizes = sizes;
  report->retained = call.kept_count();
  report->offloaded_bytes = call.offloaded.bytes;
  report->offload_seconds = call.offloaded.seconds;
  report->graph_bytes = call.graph_bytes;
  report->strategy = call.cuts ? "cut" : call.parts.empty() ? "forward" : "replay";
  for (const WrappedCall::Part& part : call.parts) {
    if (!part.tape.opaque) continue;
    report->strategy = "rerun";
    report->strategy_reason = *part.tape.opaque;
    break;
  }
  report->left_on_module = call.left_on_module;
  return report;
}

void publish(Wrapped& wrapped, std::shared_ptr<WrapReport> report) {
  const std::lock_guard<std::mutex> lock(wrapped.mutex);
  wrapped.report = std::move(report);
}

}  // namespace infinitybatch
