#include "memory/host_memory.hpp"
#include "support.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/memory/budget.hpp>
#include <infinitybatch/memory/statistics.hpp>

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

namespace infinitybatch::memory {
namespace {

using memory_test::kCpu;
using memory_test::live;

struct Good {
  const char* name;
  Budget budget;
  double expected;  // bytes, or a fraction of the device where at most 1
  std::string text;
};

class GoodBudget : public testing::TestWithParam<Good> {};

TEST_P(GoodBudget, MeansWhatItSays) {
  const Good& row = GetParam();
  const double factor = row.expected <= 1 ? static_cast<double>(stats(kCpu).total) : 1.0;
  EXPECT_EQ(row.budget.resolve(kCpu), static_cast<int64_t>(std::floor(row.expected * factor)));
  EXPECT_EQ(row.budget.text(), row.text);
}

INSTANTIATE_TEST_SUITE_P(
    Table, GoodBudget,
    testing::Values(Good{"Int", 4096, 4096, "4096"},
                    Good{"Wide", int64_t{1} << 40, 0x1p40, "1099511627776"},
                    Good{"Text", "512MiB", 512.0 * 1048576, "512MiB"},
                    Good{"SpacedText", " 1.5 GiB", 1.5 * 0x1p30, " 1.5 GiB"},
                    Good{"Decimal", "24MB", 24e6, "24MB"},
                    Good{"PlainNumber", "536870912", 536870912, "536870912"},
                    Good{"Fraction", 0.8, 0.8, "0.8"}, Good{"Whole", 1.0, 1.0, "1"},
                    Good{"Float", 0.25F, 0.25, "0.25"}, Good{"FractionAsText", "0.8", 0.8, "0.8"},
                    Good{"WholeAsText", "1.0", 1.0, "1.0"}, Good{"ShortText", " .5 ", 0.5, " .5 "},
                    Good{"Percent", "80%", 0.8, "80%"}, Good{"Letter", "24M", 24e6, "24M"}),
    [](const auto& info) { return info.param.name; });

TEST(Budget, AutoIsWhatIsLiveAndMostOfWhatIsFree) {
  const Budget budget("auto");
  EXPECT_EQ(budget.text(), "auto");
  const at::Tensor held = memory_test::block(int64_t{64} << 20);
  const auto expected = static_cast<double>(live()) + 0.9 * static_cast<double>(available(kCpu));
  // What is free changes while other programs run.
  EXPECT_NEAR(static_cast<double>(budget.resolve(kCpu)), expected, 0.1 * expected);
  EXPECT_GT(budget.resolve(kCpu), int64_t{64} << 20);
}

struct Bad {
  const char* name;
  std::function<void()> make;
  const char* message;
};

class BadBudget : public testing::TestWithParam<Bad> {};

TEST(Budget, IsCalledWhatTheUserCallsIt) {
  const auto says = [](const auto& make) {
    try {
      make();
    } catch (const InvalidArgument& error) {
      return std::string(error.what_without_backtrace()).substr(0, 12);
    }
    return std::string("accepted");
  };
  EXPECT_EQ(says([] { Budget budget("lots", "host_budget"); }), "host_budget ");
  EXPECT_EQ(says([] { Budget budget(0, "host_budget"); }), "host_budget ");
  EXPECT_EQ(says([] { Budget budget(1.5, "host_budget"); }), "host_budget ");
}

TEST_P(BadBudget, IsRefusedWithExamples) {
  try {
    GetParam().make();
    FAIL() << "accepted";
  } catch (const InvalidArgument& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find(GetParam().message), std::string::npos) << message;
    EXPECT_NE(message.find("\"512MiB\""), std::string::npos) << message;
  }
}

template <typename T>
Bad bad(const char* name, T value, const char* message) {
  return {name, [value] { Budget budget(value); }, message};
}

INSTANTIATE_TEST_SUITE_P(
    Table, BadBudget,
    testing::Values(bad("Zero", 0, "the budget is 0, but a budget has at least one byte"),
                    bad("Negative", -1, "the budget is -1, but"),
                    bad("VeryNegative", std::numeric_limits<int64_t>::min(),
                        "-9223372036854775808"),
                    bad("ZeroFraction", 0.0, "the budget is 0, but a fraction"),
                    bad("NegativeFraction", -0.5, "the budget is -0.5, but a fraction"),
                    bad("Above1", 1.5, "the budget is 1.5, but a fraction"),
                    bad("BytesAsDouble", 5.12e8, "above 0 and at most 1"),
                    bad("Nan", std::nan(""), "the budget is nan"),
                    bad("Infinite", std::numeric_limits<double>::infinity(), "inf, but"),
                    bad("Empty", "", "the budget is \"\", which is not a valid memory budget"),
                    bad("Word", "lots", "\"lots\", which is not a valid memory budget"),
                    bad("Unit", "5 parsecs", "\"5 parsecs\""),
                    bad("NegativeText", "-5MiB", "\"-5MiB\""),
                    bad("ZeroText", "0MiB", "\"0MiB\", but a budget has at least one byte"),
                    bad("FractionTextAbove1", "1.5", "\"1.5\", but a fraction"),
                    bad("NegativeFractionText", "-0.5", "\"-0.5\", but a fraction"),
                    bad("PercentAbove100", "120%", "\"120%\", but a fraction"),
                    bad("PercentAlone", "%", "\"%\""), bad("Capital", "AUTO", "\"AUTO\""),
                    bad("TooMany", "99999999TiB", "\"99999999TiB\""),
                    bad("TwoNumbers", "0.5 0.5", "\"0.5 0.5\"")),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace infinitybatch::memory
