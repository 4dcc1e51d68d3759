#include "offload/disk_file.hpp"
#include "offload/failure_injection.hpp"
#include "offload/host_block.hpp"
#include "support.hpp"

#include <infinitybatch/core/errors.hpp>

#include <gtest/gtest.h>

#include <csignal>
#include <cstring>
#include <fstream>

namespace infinitybatch::offload {
namespace {

using offload_test::Directory;
using offload_test::kCpu;

constexpr int64_t kBlockBytes = 3 * DiskFile::kAlignment;

class DiskFileTest : public testing::TestWithParam<std::pair<bool, bool>> {
 protected:
  DiskFileOptions options() const {
    return {directory_.path(), GetParam().first, GetParam().second};
  }
  std::byte* block(char value) {
    std::byte* data = memory_.piece(0, kBlockBytes).data();
    std::memset(data, value, kBlockBytes);
    return data;
  }

  Directory directory_;
  HostBlock memory_{kBlockBytes, kCpu};
};

TEST_P(DiskFileTest, GivesBackWhatWasWrittenAndHasNoName) {
  DiskFile file(options());
  EXPECT_TRUE(directory_.empty());
  EXPECT_EQ(file.directory(), directory_.path());
  EXPECT_EQ(file.tmpfile(), GetParam().first);
  for (const int i : {2, 0, 1})
    ASSERT_EQ(file.write(block('a' + i), kBlockBytes, i * kBlockBytes), 0);
  for (const int i : {1, 2, 0}) {
    const std::byte* data = block(0);
    ASSERT_EQ(file.read(block(0), kBlockBytes, i * kBlockBytes), 0);
    for (int64_t byte = 0; byte < kBlockBytes; ++byte) ASSERT_EQ(data[byte], std::byte('a' + i));
  }
  EXPECT_TRUE(directory_.empty());
}

TEST_P(DiskFileTest, SaysThatThereIsNothingToRead) {
  DiskFile file(options());
  EXPECT_EQ(file.read(block(0), kBlockBytes, 0), EIO);
}

TEST_P(DiskFileTest, LeavesThePageCacheOutUnlessItCannot) {
  DiskFile file(options());
  const bool direct = file.direct();
  if (!GetParam().second) {
    EXPECT_FALSE(direct);
  }
  // An address in the middle of a block: direct transfers refuse it.
  const std::vector<char> page(2 * DiskFile::kAlignment, 'x');
  const auto odd = reinterpret_cast<uintptr_t>(page.data()) % 512 == 0 ? 1 : 0;
  ASSERT_EQ(file.write(page.data() + odd, DiskFile::kAlignment, 0), 0);
  ASSERT_EQ(file.read(block(0), DiskFile::kAlignment, 0), 0);
  EXPECT_EQ(*reinterpret_cast<char*>(memory_.piece(0, 1).data()), 'x');
}

INSTANTIATE_TEST_SUITE_P(EveryWay, DiskFileTest,
                         testing::Values(std::pair(true, true), std::pair(true, false),
                                         std::pair(false, true), std::pair(false, false)));

TEST(DiskFile, NeedsADirectory) {
  EXPECT_THROW(DiskFile({"/no/such/directory"}), OffloadError);
  const Directory directory;
  const std::string name = directory.path() + "/file";
  std::ofstream(name) << "a file";
  try {
    DiskFile file({name});
    FAIL();
  } catch (const OffloadError& error) {
    EXPECT_NE(std::string(error.what()).find(name), std::string::npos);
  }
}

TEST(DiskFile, SaysHowMuchRoomThereIs) {
  const Directory directory;
  const DiskFile file({directory.path()});
  const auto space = std::filesystem::space(directory.path());
  EXPECT_GT(file.available(), 0);
  EXPECT_NEAR(static_cast<double>(file.available()), static_cast<double>(space.available),
              0.2 * static_cast<double>(space.available));
}

TEST(FailDisk, FailsTheNthAndOnlyThat) {
  const Directory directory;
  DiskFile file({directory.path()});
  HostBlock memory(kBlockBytes, kCpu);
  std::byte* data = memory.piece(0, kBlockBytes).data();
  FailDisk failure(2, EDQUOT);
  EXPECT_EQ(file.write(data, kBlockBytes, 0), 0);
  EXPECT_FALSE(failure.failed());
  EXPECT_EQ(file.read(data, kBlockBytes, 0), EDQUOT);
  EXPECT_TRUE(failure.failed());
  EXPECT_EQ(file.read(data, kBlockBytes, 0), 0);
  EXPECT_EQ(failure.seen(), 3);
  EXPECT_THROW(FailDisk(1), StateError);
  EXPECT_THROW(FailDisk(0), InvalidArgument);
}

}  // namespace
}  // namespace infinitybatch::offload
