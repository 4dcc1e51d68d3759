#include "tape/generators.hpp"

#include "tape/segment.hpp"

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/item.h>
#include <ATen/ops/randint.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace infinitybatch::tape {

GeneratorState fork(at::Generator generator) {
  at::Generator stream = generator.clone();
  const at::Tensor seed =
      at::randint(std::numeric_limits<int64_t>::max(), {1}, generator,
                  at::TensorOptions().dtype(at::kLong).device(generator.device()));
  stream.set_current_seed(static_cast<uint64_t>(seed.item<int64_t>()));
  return GeneratorState(stream);
}

Generators::Generators(const std::vector<at::Device>& devices) {
  const auto watch = [this](at::Device device) {
    const at::Generator& generator = at::globalContext().defaultGenerator(device);
    if (watches(generator)) return;
    const GeneratorState now(generator);
    watched_.push_back({generator, now, now});
  };
  watch(at::kCPU);
  for (const at::Device& device : devices) watch(device);
}

void Generators::before_draw(std::vector<Draw>& draws) {
  for (Watched& watched : watched_) {
    if (!watched.moved()) continue;
    strayed_ = true;
    watched.expected = GeneratorState(watched.generator);
    draws.push_back({watched.generator, watched.expected});
  }
}

bool Generators::after_draw() {
  bool drew = false;
  for (Watched& watched : watched_) {
    GeneratorState now(watched.generator);
    drew = drew || !(now == watched.expected);
    watched.expected = std::move(now);
  }
  drew_ = drew_ || drew;
  return drew;
}

bool Generators::strayed() const {
  return strayed_ || std::any_of(watched_.begin(), watched_.end(),
                                 [](const Watched& watched) { return watched.moved(); });
}

std::vector<Draw> Generators::initial() const {
  std::vector<Draw> draws;
  for (const Watched& watched : watched_) {
    draws.push_back({watched.generator, watched.initial});
  }
  return draws;
}

std::vector<Draw> Generators::now() const {
  std::vector<Draw> draws;
  for (const Watched& watched : watched_) {
    draws.push_back({watched.generator, GeneratorState(watched.generator)});
  }
  return draws;
}

bool Generators::watches(const at::Generator& generator) const {
  return std::any_of(watched_.begin(), watched_.end(),
                     [&](const Watched& watched) { return watched.generator == generator; });
}

}  // namespace infinitybatch::tape
