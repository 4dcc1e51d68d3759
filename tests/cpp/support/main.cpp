#include <gtest/gtest.h>

#include <cstdio>

// As gtest_main, but a run that executed nothing (a filter with a typing error in it, a file that
// was not linked) fails instead of passing.
int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const int status = RUN_ALL_TESTS();
  const auto& run = *testing::UnitTest::GetInstance();
  if (!testing::GTEST_FLAG(list_tests) && run.test_to_run_count() == 0) {
    std::fprintf(stderr, "no test was run\n");
    return 1;
  }
  return status;
}
