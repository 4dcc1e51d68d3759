#include "memory/host_memory.hpp"

#include <infinitybatch/core/errors.hpp>

#include <algorithm>
#include <fstream>
#include <optional>
#include <sstream>
#include <string_view>

namespace infinitybatch::memory {
namespace {

/// The number behind `key` in a file of "key number" lines: meminfo ("MemTotal:"), memory.stat.
std::optional<int64_t> number_behind(const std::string& path, std::string_view key) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string word;
    int64_t number = 0;
    if (words >> word && word == key && words >> number) return number;
  }
  return std::nullopt;
}

/// A file of one number. Empty where it is missing, or says "max".
std::optional<int64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  int64_t number = 0;
  if (file >> number) return number;
  return std::nullopt;
}

struct Version {
  const char* file_system;
  const char* limit;
  const char* usage;
  const char* reclaimable;  ///< in memory.stat: file pages that the kernel drops under pressure
};
constexpr Version kVersion1{"cgroup", "memory.limit_in_bytes", "memory.usage_in_bytes",
                            "total_inactive_file"};
constexpr Version kVersion2{"cgroup2", "memory.max", "memory.current", "inactive_file"};

bool has_word(const std::string& list, std::string_view word) {
  std::istringstream words(list);
  for (std::string each; std::getline(words, each, ',');) {
    if (each == word) return true;
  }
  return false;
}

/// This process's cgroup below the hierarchy's root, "/user.slice/job". Lines of /proc/self/cgroup
/// are number:controllers:path; version 2 has number 0 and no controllers.
std::optional<std::string> cgroup_path(const std::string& root, const Version& version) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':');
    if (first == std::string::npos) continue;
    const size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool wanted = &version == &kVersion2 ? controllers.empty() && line[0] == '0'
                                               : has_word(controllers, "memory");
    if (wanted) return line.substr(second + 1);
  }
  return std::nullopt;
}

struct Mount {
  std::string cgroup;  ///< the cgroup that is seen at `point`
  std::string point;
};

/// Lines of /proc/self/mountinfo: id parent device root point options ... - type source
/// superoptions
std::optional<Mount> cgroup_mount(const std::string& root, const Version& version) {
  std::ifstream file(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    std::istringstream before(line.substr(0, dash));
    std::istringstream after(line.substr(dash + 3));
    std::string skipped, type, options;
    Mount mount;
    before >> skipped >> skipped >> skipped >> mount.cgroup >> mount.point;
    after >> type >> skipped >> options;
    if (type != version.file_system) continue;
    if (&version == &kVersion1 && !has_word(options, "memory")) continue;
    return mount;
  }
  return std::nullopt;
}

void apply_cgroup(HostMemory& memory, const std::string& directory, const Version& version) {
  const auto limit = number_in(directory + "/" + version.limit);
  if (!limit) return;
  memory.total = std::min(memory.total, *limit);
  const auto usage = number_in(directory + "/" + version.usage);
  if (!usage) return;
  const auto reclaimable = number_behind(directory + "/memory.stat", version.reclaimable);
  const int64_t needed = *usage - std::min(*usage, reclaimable.value_or(0));
  memory.available = std::min(memory.available, std::max<int64_t>(*limit - needed, 0));
}

/// The process's own cgroup and those above it.
void apply_cgroups(HostMemory& memory, const std::string& root, const Version& version) {
  const auto mount = cgroup_mount(root, version);
  const auto path = cgroup_path(root, version);
  if (!mount || !path) return;
  // In a container the path may be the host's, and then the mount shows this process's own cgroup.
  std::string below;
  const std::string seen = mount->cgroup == "/" ? "" : mount->cgroup;
  if (path->size() >= seen.size() && path->compare(0, seen.size(), seen) == 0) {
    below = path->substr(seen.size());
  }
  const std::string top = root + mount->point;
  for (;;) {
    apply_cgroup(memory, top + below, version);
    const size_t slash = below.rfind('/');
    if (slash == std::string::npos) return;
    below.resize(slash);
  }
}

}  // namespace

HostMemory host_memory(const std::string& root) {
  const std::string meminfo = root + "/proc/meminfo";
  const auto total = number_behind(meminfo, "MemTotal:");
  const auto available = number_behind(meminfo, "MemAvailable:");
  if (!total || !available) {
    throw Unsupported("cannot read how much memory this machine has from " + meminfo +
                      "; give the memory budget in bytes, for example \"512MiB\"");
  }
  HostMemory memory{*total * 1024, *available * 1024};
  for (const Version* version : {&kVersion1, &kVersion2}) apply_cgroups(memory, root, *version);
  return memory;
}

}  // namespace infinitybatch::memory
