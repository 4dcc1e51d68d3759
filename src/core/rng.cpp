#include <infinitybatch/core/rng.hpp>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Generator.h>

#include <memory>
#include <mutex>
#include <optional>

namespace infinitybatch {
namespace {

using Save = std::function<std::function<void()>()>;

std::mutex& sources_mutex() {
  static std::mutex mutex;
  return mutex;
}

std::vector<Save>& sources() {
  static std::vector<Save> list;
  return list;
}

/// All that get_state() tells, as it lies there: a step need not make a tensor of it, word by word.
struct CpuState {
  at::mt19937 engine;
  std::optional<float> next_float_normal;
  std::optional<double> next_double_normal;

  explicit CpuState(at::CPUGeneratorImpl& generator)
      : engine(generator.engine()),
        next_float_normal(generator.next_float_normal_sample()),
        next_double_normal(generator.next_double_normal_sample()) {}

  void put_back(at::CPUGeneratorImpl& generator) const {
    generator.set_engine(engine);
    generator.set_next_float_normal_sample(next_float_normal);
    generator.set_next_double_normal_sample(next_double_normal);
  }
};

std::function<void()> save_cpu_generator(at::Generator generator) {
  auto* const impl = generator.get<at::CPUGeneratorImpl>();
  std::lock_guard<std::mutex> lock(generator.mutex());
  return [generator, impl, state = std::make_shared<const CpuState>(*impl)]() mutable {
    std::lock_guard<std::mutex> lock(generator.mutex());
    state->put_back(*impl);
  };
}

std::function<void()> save_generator(at::Generator generator) {
  at::Tensor state;
  {
    std::lock_guard<std::mutex> lock(generator.mutex());
    state = generator.get_state();
  }
  return [generator, state]() mutable {
    std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(state);
  };
}

}  // namespace

RngSnapshot RngSnapshot::capture(const std::vector<at::Device>& devices) {
  RngSnapshot snapshot;
  snapshot.restorers_.push_back(save_cpu_generator(at::globalContext().defaultGenerator(at::kCPU)));
  for (const at::Device& device : devices) {
    if (!device.is_cpu()) {
      snapshot.restorers_.push_back(save_generator(at::globalContext().defaultGenerator(device)));
    }
  }
  std::vector<Save> registered;
  {
    std::lock_guard<std::mutex> lock(sources_mutex());
    registered = sources();
  }
  for (const Save& save : registered) snapshot.restorers_.push_back(save());
  return snapshot;
}

void RngSnapshot::restore() const {
  for (const auto& restorer : restorers_) restorer();
}

void register_random_source(Save save) {
  std::lock_guard<std::mutex> lock(sources_mutex());
  sources().push_back(std::move(save));
}

}  // namespace infinitybatch
