#include "step/wrap_report.hpp"

#include "step/wrap_run.hpp"

#include <optional>
#include <utility>

namespace infinitybatch {

std::shared_ptr<WrapReport> report_of(const WrappedCall& call, const std::vector<int64_t>& sizes) {
  auto report = std::make_shared<WrapReport>();
  report->micro_batch_sizes = sizes;
  report->retained = call.run->kept_graphs();
  report->offloaded_bytes = call.offloaded.bytes;
  report->offload_seconds = call.offloaded.seconds;
  report->graph_bytes = call.graph_bytes;
  report->strategy = call.run->cut() ? "cut" : call.run->recording() ? "replay" : "forward";
  if (const auto why = call.run->engine().will_run_again()) {
    report->strategy = "rerun";
    report->strategy_reason = *why;
  }
  report->left_on_module = call.left_on_module;
  return report;
}

void report_peak(WrapReport& report, const Plan& plan, const MeasuredPeak& peak) {
  const std::optional<int64_t>& predicted = plan.predicted_peak_bytes;
  report.peak_bytes = peak.bytes;
  const bool more = peak.beside_plan && peak.bytes > predicted && peak.of_plan <= predicted;
  if (!more) report.predicted_peak_bytes = predicted;
}

void publish(Wrapped& wrapped, std::shared_ptr<WrapReport> report) {
  const std::lock_guard<std::mutex> lock(wrapped.mutex);
  wrapped.report = std::move(report);
}

}  // namespace infinitybatch
