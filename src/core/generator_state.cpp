#include "core/generator_state.hpp"

#include "core/recycled.hpp"
#include "core/rng.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>

#include <cstring>
#include <mutex>

namespace infinitybatch {

GeneratorState::GeneratorState(at::Generator generator) {
  if (!generator.device().is_cpu()) {
    state_ = state_of(generator);
    return;
  }
  const std::lock_guard<std::mutex> lock(generator.mutex());
  auto* const impl = generator.get<at::CPUGeneratorImpl>();
  engine_ = recycled(impl->engine());
  spare_double_ = impl->next_double_normal_sample();
  spare_float_ = impl->next_float_normal_sample();
}

void GeneratorState::put_back(at::Generator generator) const {
  if (!engine_) return set_state(generator, state_);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  auto* const impl = generator.get<at::CPUGeneratorImpl>();
  impl->set_engine(*engine_);
  impl->set_next_double_normal_sample(spare_double_);
  impl->set_next_float_normal_sample(spare_float_);
}

bool GeneratorState::operator==(const GeneratorState& other) const {
  if (engine_ && other.engine_) {
    const at::mt19937_data_pod a = engine_->data();
    const at::mt19937_data_pod b = other.engine_->data();
    return a.seed_ == b.seed_ && a.left_ == b.left_ && a.next_ == b.next_ && a.state_ == b.state_ &&
           spare_double_ == other.spare_double_ && spare_float_ == other.spare_float_;
  }
  return state_.defined() && other.state_.defined() && state_.nbytes() == other.state_.nbytes() &&
         std::memcmp(state_.const_data_ptr(), other.state_.const_data_ptr(), state_.nbytes()) == 0;
}

}  // namespace infinitybatch
