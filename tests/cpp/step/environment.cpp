#include <ATen/Parallel.h>
#include <gtest/gtest.h>

namespace infinitybatch::testing {
namespace {

/// Shapes are tiny: a second thread only waits, and makes rounding and memory depend on the
/// machine. Tests that are about threads set their own number.
class OneThread : public ::testing::Environment {
  void SetUp() override { at::set_num_threads(1); }
};

::testing::Environment* const one_thread = ::testing::AddGlobalTestEnvironment(new OneThread);

}  // namespace
}  // namespace infinitybatch::testing
