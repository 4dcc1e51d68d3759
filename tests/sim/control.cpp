// What Python asks of the device: plain functions, so that no binding library is compiled.
#include "clock.hpp"
#include "device.hpp"
#include "memory.hpp"

#include <algorithm>
#include <cstring>

#define SIM_EXPORT extern "C" __attribute__((visibility("default")))

SIM_EXPORT void sim_set(const char* name, int64_t value) {
  auto& settings = sim::settings();
  const std::string which(name);
  if (which == "capacity") settings.capacity = value;
  if (which == "rounding") settings.rounding = value != 0;
  if (which == "fail_after") settings.fail_after = value;
  if (which == "blas_workspace") settings.blas_workspace = value != 0;
  if (which == "conv_workspaces") settings.conv_workspaces = value != 0;
  if (which == "atomics") settings.atomics = value != 0;
}

SIM_EXPORT void sim_reset() {
  sim::Order::instance().reset();
}

/// Writes what was found since `sim_reset`, a line each, and returns how long the text is.
SIM_EXPORT int64_t sim_races(char* text, int64_t size) {
  sim::Order::instance().check_pinned();
  std::string all;
  for (const std::string& race : sim::Order::instance().races()) all += race + "\n";
  std::strncpy(text, all.c_str(), static_cast<size_t>(size));
  return static_cast<int64_t>(all.size());
}

SIM_EXPORT int64_t sim_syncs(char* text, int64_t size) {
  std::string all;
  for (const auto& [kind, count] : sim::Order::instance().syncs()) {
    all += kind + "=" + std::to_string(count) + "\n";
  }
  std::strncpy(text, all.c_str(), static_cast<size_t>(size));
  return static_cast<int64_t>(all.size());
}

SIM_EXPORT int64_t sim_live_blocks() {
  return sim::live_blocks();
}

SIM_EXPORT void sim_seed(int device, uint64_t seed) {
  sim::default_generator(device).set_current_seed(seed);
}

SIM_EXPORT void sim_generator_state(int device, uint64_t* numbers, int write) {
  at::Generator generator = sim::default_generator(device);
  if (write != 0) {
    generator.set_current_seed(numbers[0]);
    generator.set_offset(numbers[1]);
  }
  numbers[0] = generator.current_seed();
  numbers[1] = generator.get_offset();
}
