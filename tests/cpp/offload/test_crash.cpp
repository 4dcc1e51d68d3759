// What is left behind when a process ends in the middle, and full disks that are real.
#include "offload/store.hpp"
#include "support.hpp"

#include <infinitybatch/core/errors.hpp>

#include <gtest/gtest.h>

#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>

namespace infinitybatch::offload {
namespace {

using offload_test::Directory;
using offload_test::handles;
using offload_test::kCpu;
using offload_test::live;
using offload_test::Values;

constexpr int64_t kOffloaded = int64_t{128} << 20;

/// Offloads them in `directory`, says so, and waits. Nothing here may use torch's threads: they do
/// not follow a fork.
[[noreturn]] void offload_and_wait(const std::string& directory, int say, bool try_tmpfile) {
  Store store(kCpu, {.host_bytes = 0, .file = {directory, try_tmpfile}});
  std::vector<at::Tensor> tensors = handles(at::empty({kOffloaded}, at::kByte));
  std::memset(tensors[0].mutable_data_ptr(), 1, kOffloaded);
  const Offloaded offloaded = store.put(tensors);
  const char done = offloaded.bytes().moves == kOffloaded ? 'y' : 'n';
  if (write(say, &done, 1) != 1) _exit(1);
  while (true) pause();
}

/// Bytes on disk of a process's open files that have no name, which end with it.
int64_t nameless_bytes(pid_t process, const std::string& directory) {
  int64_t bytes = 0;
  const std::string files = "/proc/" + std::to_string(process) + "/fd";
  for (const auto& entry : std::filesystem::directory_iterator(files)) {
    struct stat status{};
    const std::string target = std::filesystem::read_symlink(entry.path()).string();
    if (!target.starts_with(directory) || stat(entry.path().c_str(), &status) != 0) continue;
    if (status.st_nlink == 0) bytes += int64_t{status.st_blocks} * 512;
  }
  return bytes;
}

class KilledWhileOffloaded : public testing::TestWithParam<bool> {};

TEST_P(KilledWhileOffloaded, LeavesNothingBehind) {
  const Directory directory;
  const auto free_bytes = [&] {
    return static_cast<int64_t>(std::filesystem::space(directory.path()).free);
  };
  const int64_t free_before = free_bytes();
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) offload_and_wait(directory.path(), ends[1], GetParam());
  close(ends[1]);
  char done = 0;
  const ssize_t heard = read(ends[0], &done, 1);
  const int64_t free_while = free_bytes();
  const bool empty_while = directory.empty();
  const int64_t nameless = nameless_bytes(child, directory.path());
  kill(child, SIGKILL);
  int status = 0;
  waitpid(child, &status, 0);
  close(ends[0]);
  ASSERT_EQ(heard, 1);
  ASSERT_EQ(done, 'y');
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_TRUE(empty_while);
  EXPECT_TRUE(directory.empty());
  EXPECT_GE(nameless, kOffloaded);
  // Others use the disk at the same time: a part of it is enough.
  EXPECT_GT(free_before - free_while, kOffloaded / 4) << "it was on disk";
  EXPECT_GT(free_bytes() - free_while, kOffloaded / 4) << "and is free again";
}

INSTANTIATE_TEST_SUITE_P(EveryWay, KilledWhileOffloaded, testing::Bool());

/// Files of this process may have at most so many bytes.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    getrlimit(RLIMIT_FSIZE, &before_);
    rlimit limit = before_;
    limit.rlim_cur = bytes;
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() { setrlimit(RLIMIT_FSIZE, &before_); }

 private:
  rlimit before_{};
};

TEST(FullDisk, ALimitOnFileSizesIsAnErrorAndNoSignal) {
  Values values({9'000'000, 9'000'000});
  const Directory directory;
  Store store(kCpu, {.file = {directory.path()}});
  const int64_t before = live();
  {
    const FileSizeLimit limit(12'000'000);
    try {
      store.put(values.tensors);
      FAIL();
    } catch (const OffloadError& error) {
      EXPECT_EQ(error.needed(), 18'001'920);
      EXPECT_LE(error.available(), 12'000'000);
      EXPECT_NE(std::string(error.what()).find(directory.path()), std::string::npos);
    }
  }
  EXPECT_EQ(live(), before);
  EXPECT_TRUE(values.same());
  Offloaded offloaded = store.put(values.tensors);
  offloaded.bring_back();
  EXPECT_TRUE(values.same());
}

TEST(FullDisk, ASmallFileSystemIsAnError) {
  const Directory directory;
  if (mount("tmpfs", directory.path().c_str(), "tmpfs", 0, "size=16m") != 0) {
    GTEST_SKIP() << "mounting a small file system needs root: " << std::strerror(errno);
  }
  struct Unmount {
    const std::string& path;
    ~Unmount() { umount2(path.c_str(), MNT_DETACH); }
  } unmount{directory.path()};
  Values values({9'000'000, 9'000'000});
  {
    Store store(kCpu, {.file = {directory.path()}});
    const int64_t before = live();
    for (int time = 0; time < 2; ++time) {
      try {
        store.put(values.tensors);
        FAIL();
      } catch (const OffloadError& error) {
        EXPECT_EQ(error.needed(), 18'001'920);
        EXPECT_LT(error.available(), 16 << 20);
      }
      EXPECT_EQ(live(), before);
      EXPECT_TRUE(values.same());
      Offloaded smaller = store.put(at::ArrayRef<at::Tensor>(values.tensors).slice(0, 1));
      smaller.bring_back();
      EXPECT_TRUE(values.same());
    }
  }
  EXPECT_EQ(std::filesystem::space(directory.path()).free, 16 << 20);
}

}  // namespace
}  // namespace infinitybatch::offload
