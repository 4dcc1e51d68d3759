#include "generators.hpp"

#include <infinitybatch/tape/segment.hpp>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/item.h>
#include <ATen/ops/randint.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <mutex>

namespace infinitybatch::tape {

at::Tensor state_of(at::Generator generator) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void set_state(at::Generator generator, const at::Tensor& state) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

at::Tensor fork(at::Generator generator) {
  at::Generator stream = generator.clone();
  const at::Tensor seed =
      at::randint(std::numeric_limits<int64_t>::max(), {1}, generator,
                  at::TensorOptions().dtype(at::kLong).device(generator.device()));
  stream.set_current_seed(static_cast<uint64_t>(seed.item<int64_t>()));
  return stream.get_state();
}

bool Generators::Position::operator==(const Position& other) const {
  if (engine) {
    const auto& a = *engine;
    const auto& b = *other.engine;
    return a.seed_ == b.seed_ && a.left_ == b.left_ && a.next_ == b.next_ && a.state_ == b.state_ &&
           spare_double == other.spare_double && spare_float == other.spare_float;
  }
  return state.nbytes() == other.state.nbytes() &&
         std::memcmp(state.const_data_ptr(), other.state.const_data_ptr(), state.nbytes()) == 0;
}

Generators::Position Generators::position_of(at::Generator generator) {
  Position here;
  if (!generator.device().is_cpu()) {
    here.state = state_of(generator);
    return here;
  }
  const std::lock_guard<std::mutex> lock(generator.mutex());
  auto* impl = generator.get<at::CPUGeneratorImpl>();
  here.engine = impl->engine().data();
  here.spare_double = impl->next_double_normal_sample();
  here.spare_float = impl->next_float_normal_sample();
  return here;
}

Generators::Generators(const std::vector<at::Device>& devices) {
  const auto watch = [this](at::Device device) {
    const at::Generator& generator = at::globalContext().defaultGenerator(device);
    if (!watches(generator)) initial_.push_back({generator, state_of(generator)});
  };
  watch(at::kCPU);
  for (const at::Device& device : devices) watch(device);
  for (const Draw& draw : initial_) expected_.push_back(position_of(draw.generator));
}

void Generators::before_draw(std::vector<Draw>& draws) {
  drew_ = true;
  for (size_t i = 0; i < initial_.size(); ++i) {
    const at::Generator& generator = initial_[i].generator;
    if (!moved(i)) continue;
    strayed_ = true;
    draws.push_back({generator, state_of(generator)});
    expected_[i] = position_of(generator);
  }
}

bool Generators::after_draw() {
  bool drew = false;
  for (size_t i = 0; i < initial_.size(); ++i) {
    Position now = position_of(initial_[i].generator);
    drew = drew || !(now == expected_[i]);
    expected_[i] = std::move(now);
  }
  return drew;
}

bool Generators::strayed() const {
  bool strayed = strayed_;
  for (size_t i = 0; i < initial_.size(); ++i) strayed = strayed || moved(i);
  return strayed;
}

std::vector<Draw> Generators::now() const {
  std::vector<Draw> draws = initial_;
  for (Draw& draw : draws) draw.state = state_of(draw.generator);
  return draws;
}

bool Generators::watches(const at::Generator& generator) const {
  return std::any_of(initial_.begin(), initial_.end(),
                     [&](const Draw& draw) { return draw.generator == generator; });
}

bool Generators::touched() const {
  if (drew_) return true;
  for (size_t i = 0; i < initial_.size(); ++i) {
    if (moved(i)) return true;
  }
  return false;
}

}  // namespace infinitybatch::tape
