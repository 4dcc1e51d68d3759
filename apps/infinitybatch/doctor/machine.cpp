#include "device.hpp"
#include "doctor/check.hpp"
#include "memory/host_memory.hpp"
#include "memory/pages.hpp"
#include "output/numbers.hpp"

#include <infinitybatch/core/bytes.hpp>
#include <infinitybatch/memory/statistics.hpp>

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <sched.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <optional>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace infinitybatch::app {
namespace {

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

/// Processors that this process may run on.
int allowed_processors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return ::sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 0;
}

/// Processors' worth of time that the container allows (cgroup version 2); empty where unlimited.
std::optional<double> processor_quota() {
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  std::string quota;
  double period = 0;
  if (!(file >> quota >> period) || quota == "max" || period <= 0) {
    return std::nullopt;
  }
  return std::strtod(quota.c_str(), nullptr) / period;
}

/// Bytes of this process that are in memory; 0 where the system does not tell.
int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t all = 0;
  int64_t resident = 0;
  return file >> all >> resident ? resident * ::sysconf(_SC_PAGESIZE) : 0;
}

/// What tensors, malloc and the process hold once the checks in front have run a step.
void add_statistics(Check& check) {
  const int64_t tensors = memory::stats(c10::Device(c10::DeviceType::CPU)).live;
  const int64_t resident = resident_bytes();
  check.values.update({{"tensor_bytes", tensors}, {"resident_bytes", resident}});
  check.finding +=
      "; this process holds " + format_bytes(resident) + ", tensors " + format_bytes(tensors);
#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 33)
  const struct mallinfo2 heap = mallinfo2();
  const auto used = static_cast<int64_t>(heap.uordblks + heap.hblkhd);
  const auto free = static_cast<int64_t>(heap.fordblks);
  check.values.update({{"malloc_used_bytes", used}, {"malloc_free_bytes", free}});
  check.finding +=
      "; malloc has " + format_bytes(used) + " in use and " + format_bytes(free) + " free";
#endif
}

}  // namespace

Check check_devices() {
  Check check("devices");
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  for (const c10::Device& device : usable_devices()) {
    const auto now = memory::stats(device);
    check.finding +=
        (check.finding.empty() ? "" : ", ") + device.str() + " (" + format_bytes(now.total) + ")";
    all.push_back({{"name", device.str()}, {"total_bytes", now.total}, {"live_bytes", now.live}});
  }
  check.values = {{"devices", all}};
  return check;
}

Check check_memory() {
  constexpr int64_t kLittle = int64_t{512} << 20;
  Check check("memory");
  const auto host = memory::host_memory();
  check.finding = format_bytes(host.available) + " available of " + format_bytes(host.total) +
                  " (physical memory, or what the container allows)";
  if (host.available < kLittle) {
    check.health = Health::note;
    check.remedy =
        "less than 512 MiB are free: set --memory-budget below that, or end other programs";
  }
  check.values = {{"total_bytes", host.total}, {"available_bytes", host.available}};
  return check;
}

Check check_threads() {
  Check check("threads");
  const int threads = at::get_num_threads();
  const int processors = allowed_processors();
  const auto quota = processor_quota();
  check.finding = std::to_string(threads) + " threads on " + std::to_string(processors) +
                  " processors, kernels for " + at::get_cpu_capability();
  if (quota) {
    check.finding += ", the container allows the time of " + shortest(*quota);
  }
  double load = 0;  // programs that want to run, this one included, over the last minute
  const bool load_known = ::getloadavg(&load, 1) == 1;
  if (load_known) {
    check.finding += ", load " + fixed(load, 1);
  }
  const bool too_many =
      (processors > 0 && threads > processors) || (quota && threads > *quota + 0.5);
  if (too_many) {
    check.health = Health::note;
    check.remedy = "more threads than processors slow each other down; set OMP_NUM_THREADS";
  } else if (load_known && threads > 1 && load > processors + 1) {
    check.health = Health::note;
    check.remedy =
        "other programs want the same processors, and threads that wait for each other "
        "by spinning then take many times as long; set OMP_WAIT_POLICY=passive, or "
        "OMP_NUM_THREADS=1";
  }
  check.values = {{"threads", threads},
                  {"processors", processors},
                  {"processor_quota", quota ? nlohmann::ordered_json(*quota) : nullptr},
                  {"load", load_known ? nlohmann::ordered_json(load) : nullptr},
                  {"capability", at::get_cpu_capability()}};
  return check;
}

Check check_malloc() {
  Check check("malloc");
  const std::string mmap = environment("MALLOC_MMAP_THRESHOLD_");
  const std::string trim = environment("MALLOC_TRIM_THRESHOLD_");
  const std::string preload = environment("LD_PRELOAD");
  const bool own_pages = memory::Pages::supported();
  check.values = {{"MALLOC_MMAP_THRESHOLD_", mmap},
                  {"MALLOC_TRIM_THRESHOLD_", trim},
                  {"LD_PRELOAD", preload},
                  {"own_pages", own_pages}};
  if (own_pages) {
    check.finding = "large tensors come in pages that are kept for the next ones";
  } else if (!preload.empty()) {
    check.finding = "LD_PRELOAD is " + preload;
  } else if (!mmap.empty() && !trim.empty()) {
    check.finding = "glibc keeps freed memory: MALLOC_MMAP_THRESHOLD_ is " + mmap +
                    ", MALLOC_TRIM_THRESHOLD_ is " + trim;
  } else {
    check.health = Health::note;
    check.finding = "glibc gives large blocks back at once and pays page faults for each new one";
    check.remedy =
        "for speed, native training above all: export MALLOC_MMAP_THRESHOLD_=4294967296 "
        "MALLOC_TRIM_THRESHOLD_=4294967296";
  }
  add_statistics(check);
  return check;
}

}  // namespace infinitybatch::app
