#include "tape/modes.hpp"

#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
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

// Torch's own switches have no lock; what is kept of one moment is of that moment alone.
TEST(Modes, ASwitchThatAnotherThreadTurnsThereAndBackIsSeenAsItEnds) {
  at::Context& context = at::globalContext();
  const bool before = context.deterministicMkldnn();
  context.setDeterministicMkldnn(before);
  const Modes quiet = Modes::current();
  for (int round = 0; round < 200; ++round) {
    std::atomic<bool> stop = false;
    std::thread other([&] {
      while (!stop) {
        context.setDeterministicMkldnn(!before);
        context.setDeterministicMkldnn(before);
      }
    });
    for (int i = 0; i < 200; ++i) Modes::current();
    stop = true;
    other.join();
    ASSERT_TRUE(Modes::current() == quiet) << "round " << round;
  }
}

}  // namespace
}  // namespace infinitybatch::tape
