#include "step/sequence_inputs.hpp"

namespace infinitybatch {

SequenceInputs::Told SequenceInputs::meet(const std::string& what, int64_t full, int64_t length) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Seen& seen = seen_.try_emplace(what, Seen{full, Told::nothing}).first->second;
  if (length != full) {
    seen.told = Told::stays;
  } else if (seen.told == Told::nothing && full != seen.full) {
    seen.told = Told::follows;
  }
  return seen.told;
}

}  // namespace infinitybatch
