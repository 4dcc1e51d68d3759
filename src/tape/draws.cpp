#include "tape/draws.hpp"

namespace infinitybatch::tape {

void set_states(const std::vector<Draw>& states) {
  for (const Draw& draw : states) draw.state.put_back(draw.generator);
}

GeneratorsGuard::GeneratorsGuard(const Tape& tape) {
  const auto save = [this](const Draw& draw) {
    before_.emplace_back(draw.generator, GeneratorState(draw.generator));
  };
  for (const Draw& draw : tape.initial) save(draw);
  for (const Draw& draw : tape.draws) {
    if (draw.passed) save(draw);
  }
}

GeneratorsGuard::~GeneratorsGuard() {
  // In reverse: a generator that is met twice ends as it was found first.
  for (size_t i = before_.size(); i-- > 0;) before_[i].second.put_back(before_[i].first);
}

}  // namespace infinitybatch::tape
