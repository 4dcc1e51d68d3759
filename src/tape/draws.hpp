#pragma once

#include "tape/tape.hpp"

#include <utility>
#include <vector>

namespace infinitybatch::tape {

/// Makes the generators stand where `states` say, the last one of each.
void set_states(const std::vector<Draw>& states);

/// Puts the state of every generator back that a tape sets, or that its recording has seen drawn
/// from where it is opaque.
class GeneratorsGuard {
 public:
  explicit GeneratorsGuard(const Tape& tape);
  ~GeneratorsGuard();
  GeneratorsGuard(const GeneratorsGuard&) = delete;
  GeneratorsGuard& operator=(const GeneratorsGuard&) = delete;

 private:
  std::vector<std::pair<at::Generator, GeneratorState>> before_;
};

}  // namespace infinitybatch::tape
