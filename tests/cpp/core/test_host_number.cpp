// Numbers read from the host's memory: the same as by ops, or nothing.
#include "core/host_number.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace infinitybatch {
namespace {

int64_t counted_by_ops(const at::Tensor& tensor, int64_t value) {
  return tensor.ne(value).sum().item<int64_t>();
}

TEST(HostCount, IsWhatOpsCount) {
  const at::Tensor labels = torch::randint(-1, 3, {5, 7}, at::kLong);
  for (const at::Tensor& tensor : {labels, labels.slice(0, 1, 4), labels.flatten(),
                                   labels.slice(0, 2, 2), torch::tensor(int64_t{-1})}) {
    for (const int64_t value : {-1, 0, 100}) {
      const auto count = host_count_without(tensor, value);
      ASSERT_TRUE(count.has_value());
      EXPECT_EQ(*count, counted_by_ops(tensor, value));
    }
  }
}

TEST(HostCount, LeavesToOpsWhatIsNotPlainMemoryInARow) {
  const at::Tensor labels = torch::randint(-1, 3, {5, 7}, at::kLong);
  EXPECT_EQ(host_count_without(labels.t(), 0), std::nullopt);
  EXPECT_EQ(host_count_without(labels.select(1, 0), 0), std::nullopt);
  EXPECT_EQ(host_count_without(labels.to(at::kInt), 0), std::nullopt);
  EXPECT_EQ(host_count_without(labels.to(at::kMeta), 0), std::nullopt);
  EXPECT_EQ(host_count_without(at::Tensor(), 0), std::nullopt);
}

}  // namespace
}  // namespace infinitybatch
