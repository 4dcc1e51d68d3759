#include "core/rng.hpp"

#include "core/generator_state.hpp"

#include <ATen/Context.h>
#include <ATen/core/Generator.h>

#include <mutex>

namespace infinitybatch {
namespace {

struct Source {
  std::function<std::function<void()>()> save;
  std::string name;
  std::function<std::string()> tell;
};

std::mutex& sources_mutex() {
  static std::mutex mutex;
  return mutex;
}

std::vector<Source>& sources() {
  static std::vector<Source> list;
  return list;
}

std::vector<Source> registered() {
  const std::lock_guard<std::mutex> lock(sources_mutex());
  return sources();
}

std::function<void()> save_generator(const at::Generator& generator) {
  return [generator, state = GeneratorState(generator)] { state.put_back(generator); };
}

}  // namespace

at::Tensor state_of(at::Generator generator) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void set_state(at::Generator generator, const at::Tensor& state) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

RngSnapshot RngSnapshot::capture(const std::vector<at::Device>& devices) {
  RngSnapshot snapshot;
  snapshot.restorers_.push_back(save_generator(at::globalContext().defaultGenerator(at::kCPU)));
  for (const at::Device& device : devices) {
    if (!device.is_cpu()) {
      snapshot.restorers_.push_back(save_generator(at::globalContext().defaultGenerator(device)));
    }
  }
  for (auto& restorer : capture_foreign().restorers_) {
    snapshot.restorers_.push_back(std::move(restorer));
  }
  return snapshot;
}

RngSnapshot RngSnapshot::capture_foreign() {
  RngSnapshot snapshot;
  for (const Source& source : registered()) snapshot.restorers_.push_back(source.save());
  return snapshot;
}

void RngSnapshot::restore() const {
  for (const auto& restorer : restorers_) restorer();
}

void register_random_source(std::function<std::function<void()>()> save, std::string name,
                            std::function<std::string()> tell) {
  const std::lock_guard<std::mutex> lock(sources_mutex());
  sources().push_back({std::move(save), std::move(name), std::move(tell)});
}

std::map<std::string, std::string> tell_foreign_sources() {
  std::map<std::string, std::string> told;
  for (const Source& source : registered()) told[source.name] = source.tell();
  return told;
}

}  // namespace infinitybatch
