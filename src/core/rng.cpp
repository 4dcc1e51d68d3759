#include <infinitybatch/core/rng.hpp>

#include <ATen/Context.h>
#include <ATen/core/Generator.h>

#include <mutex>

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
  snapshot.restorers_.push_back(save_generator(at::globalContext().defaultGenerator(at::kCPU)));
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
