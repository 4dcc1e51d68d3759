#include "execute/execution_log.hpp"

#include <atomic>
#include <mutex>
#include <utility>

namespace infinitybatch {
namespace {

std::atomic<bool> keeps_log{false};
std::mutex log_mutex;
std::vector<std::string> log_lines;

void add(std::string line) {
  const std::lock_guard<std::mutex> lock(log_mutex);
  log_lines.push_back(std::move(line));
}

std::string with_rows(const std::string& what, Rows rows) {
  return what + " " + std::to_string(rows.begin) + ":" + std::to_string(rows.end);
}

}  // namespace

void ExecutionLog::keep(bool on) {
  take();
  keeps_log = on;
}

std::vector<std::string> ExecutionLog::take() {
  const std::lock_guard<std::mutex> lock(log_mutex);
  return std::exchange(log_lines, {});
}

void ExecutionLog::note(const Instruction& instruction, Rows rows) {
  if (!keeps_log) return;
  std::string line = name_of(instruction.operation);
  if (instruction.micro_batch >= 0) line = with_rows(line, rows);
  if (instruction.segment >= 0) line += " segment " + std::to_string(instruction.segment);
  add(std::move(line));
}

}  // namespace infinitybatch
