#include "memory/host_memory.hpp"

#include <infinitybatch/core/errors.hpp>

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

namespace infinitybatch::memory {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;

/// A made-up machine of 16 GiB with 12 GiB available.
class HostMemoryTest : public testing::Test {
 protected:
  HostMemoryTest() {
    std::string name = (std::filesystem::temp_directory_path() / "infinitybatch-XXXXXX").string();
    root_ = mkdtemp(name.data());
    write("/proc/meminfo",
          "MemTotal:       16777216 kB\nMemFree:  1 kB\nMemAvailable:   12582912 kB\n");
  }
  ~HostMemoryTest() override { std::filesystem::remove_all(root_); }

  void write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }
  void cgroup(const std::string& directory, const std::string& max, int64_t current,
              int64_t inactive_file) {
    write(directory + "/memory.max", max + "\n");
    write(directory + "/memory.current", std::to_string(current) + "\n");
    write(directory + "/memory.stat",
          "anon 5\ninactive_file " + std::to_string(inactive_file) + "\n");
  }

  std::string root_;
};

constexpr const char* kMount2 =
    "24 1 0:22 / /proc rw - proc proc rw\n"
    "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";

TEST_F(HostMemoryTest, IsPhysicalMemoryWithoutCgroups) {
  const HostMemory memory = host_memory(root_);
  EXPECT_EQ(memory.total, 16 * kGiB);
  EXPECT_EQ(memory.available, 12 * kGiB);
}

TEST_F(HostMemoryTest, HeedsVersion2) {
  write("/proc/self/cgroup", "0::/job/step\n");
  write("/proc/self/mountinfo", kMount2);
  cgroup("/sys/fs/cgroup/job/step", std::to_string(4 * kGiB), 3 * kGiB, kGiB);
  const HostMemory memory = host_memory(root_);
  EXPECT_EQ(memory.total, 4 * kGiB);
  EXPECT_EQ(memory.available, 2 * kGiB) << "inactive file pages can be dropped";
}

TEST_F(HostMemoryTest, HeedsTheGroupsAbove) {
  write("/proc/self/cgroup", "0::/job/step\n");
  write("/proc/self/mountinfo", kMount2);
  cgroup("/sys/fs/cgroup/job", std::to_string(2 * kGiB), kGiB, 0);
  cgroup("/sys/fs/cgroup/job/step", "max", kGiB, 0);
  const HostMemory memory = host_memory(root_);
  EXPECT_EQ(memory.total, 2 * kGiB);
  EXPECT_EQ(memory.available, kGiB);
}

TEST_F(HostMemoryTest, IsNeverNegative) {
  write("/proc/self/cgroup", "0::/\n");
  write("/proc/self/mountinfo", kMount2);
  cgroup("/sys/fs/cgroup", std::to_string(kGiB), 2 * kGiB, 0);
  EXPECT_EQ(host_memory(root_).available, 0);
}

TEST_F(HostMemoryTest, IsNotRaisedByAGenerousGroup) {
  write("/proc/self/cgroup", "0::/job\n");
  write("/proc/self/mountinfo", kMount2);
  cgroup("/sys/fs/cgroup/job", std::to_string(100 * kGiB), 0, 0);
  const HostMemory memory = host_memory(root_);
  EXPECT_EQ(memory.total, 16 * kGiB);
  EXPECT_EQ(memory.available, 12 * kGiB);
}

TEST_F(HostMemoryTest, HeedsVersion1BesideAnEmptyVersion2) {
  write("/proc/self/cgroup", "9:name=systemd:/\n4:cpuacct,memory:/api/job\n0::/\n");
  write("/proc/self/mountinfo",
        "33 31 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
        "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n");
  const std::string job = "/sys/fs/cgroup/memory/api/job";
  write(job + "/memory.limit_in_bytes", std::to_string(8 * kGiB));
  write(job + "/memory.usage_in_bytes", std::to_string(6 * kGiB));
  write(job + "/memory.stat", "inactive_file 7\ntotal_inactive_file " + std::to_string(kGiB));
  write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712");
  const HostMemory memory = host_memory(root_);
  EXPECT_EQ(memory.total, 8 * kGiB);
  EXPECT_EQ(memory.available, 3 * kGiB);
}

TEST_F(HostMemoryTest, FindsItsGroupInAContainer) {
  // The mount shows the container's own group, while /proc/self/cgroup says the host's path.
  write("/proc/self/cgroup", "0::/kubepods/pod7/box\n");
  write("/proc/self/mountinfo",
        "30 23 0:26 /kubepods/pod7/box /sys/fs/cgroup ro - cgroup2 cgroup ro\n");
  cgroup("/sys/fs/cgroup", std::to_string(3 * kGiB), 0, 0);
  EXPECT_EQ(host_memory(root_).total, 3 * kGiB);
  write("/proc/self/cgroup", "0::/elsewhere\n");
  EXPECT_EQ(host_memory(root_).total, 3 * kGiB);
}

TEST_F(HostMemoryTest, SaysWhenItCannotKnow) {
  std::filesystem::remove(root_ + "/proc/meminfo");
  EXPECT_THROW(host_memory(root_), Unsupported);
}

TEST(HostMemory, OfThisMachineIsSensible) {
  const HostMemory memory = host_memory();
  EXPECT_GT(memory.available, 0);
  EXPECT_LE(memory.available, memory.total);
  EXPECT_LE(memory.total, sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGE_SIZE));
}

}  // namespace
}  // namespace infinitybatch::memory
