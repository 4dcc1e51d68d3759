#include <infinitybatch/tape/modes.hpp>

#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace infinitybatch::tape {
namespace {

struct Setting {
  std::string name;
  bool (*get)(const at::Context&);
  void (*set)(at::Context&, bool);
};

#define SETTING(getter, setter)                                       \
  Setting {                                                           \
    #getter, [](const at::Context& c) -> bool { return c.getter(); }, \
        [](at::Context& c, bool on) { c.setter(on); }                 \
  }

std::vector<Setting> settings() {
  return {
      SETTING(userEnabledFlashSDP, setSDPUseFlash),
      SETTING(userEnabledMemEfficientSDP, setSDPUseMemEfficient),
      SETTING(userEnabledMathSDP, setSDPUseMath),
      SETTING(userEnabledCuDNNSDP, setSDPUseCuDNN),
      SETTING(userEnabledOverrideableSDP, setSDPUseOverrideable),
      SETTING(userEnabledCuDNN, setUserEnabledCuDNN),
      SETTING(userEnabledMkldnn, setUserEnabledMkldnn),
      SETTING(userEnabledNNPACK, setUserEnabledNNPACK),
      SETTING(benchmarkCuDNN, setBenchmarkCuDNN),
      SETTING(deterministicCuDNN, setDeterministicCuDNN),
      SETTING(deterministicMkldnn, setDeterministicMkldnn),
      SETTING(deterministicFillUninitializedMemory, setDeterministicFillUninitializedMemory),
      {"deterministicAlgorithms", [](const at::Context& c) { return c.deterministicAlgorithms(); },
       [](at::Context& c, bool on) { c.setDeterministicAlgorithms(on, false); }},
  };
}

/// Not all of them are asked for each time: a switch that is turned, and turned back, is seen.
TEST(Modes, EverySwitchThatIsTurnedIsSeenAndPutBack) {
  at::Context& context = at::globalContext();
  for (const Setting& setting : settings()) {
    const bool was = setting.get(context);
    const Modes before = Modes::current();
    EXPECT_EQ(Modes::current(), before) << setting.name;
    setting.set(context, !was);
    const Modes turned = Modes::current();
    EXPECT_NE(turned, before) << setting.name;
    EXPECT_EQ(Modes::current(), turned) << setting.name;
    before.apply();
    EXPECT_EQ(setting.get(context), was) << setting.name;
    EXPECT_EQ(Modes::current(), before) << setting.name;
    turned.apply();
    EXPECT_EQ(setting.get(context), !was) << setting.name;
    setting.set(context, was);
    EXPECT_EQ(Modes::current(), before) << setting.name;
  }
}

TEST(Modes, WarningOnlyIsSeen) {
  at::Context& context = at::globalContext();
  context.setDeterministicAlgorithms(true, false);
  const Modes strict = Modes::current();
  context.setDeterministicAlgorithms(true, true);
  const Modes warns = Modes::current();
  context.setDeterministicAlgorithms(false, false);
  EXPECT_NE(strict, warns);
  EXPECT_NE(Modes::current(), strict);
}

}  // namespace
}  // namespace infinitybatch::tape
