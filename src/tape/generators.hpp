#pragma once

#include "core/generator_state.hpp"
#include "tape/tape.hpp"

#include <vector>

namespace infinitybatch::tape {

/// The default generators that a recording watches, and what user code does to them between ops.
class Generators {
 public:
  explicit Generators(const std::vector<at::Device>& devices);

  /// In front of an op that draws: notes the generators that were seeded, or drawn from, by
  /// something else than an op since.
  void before_draw(std::vector<Draw>& draws);
  /// Whether the op drew.
  bool after_draw();
  /// Whether something else than an op has moved one.
  bool strayed() const;
  bool watches(const at::Generator& generator) const;
  /// Whether an op that draws has been met.
  bool drew() const noexcept { return drew_; }
  /// As the recording found them.
  std::vector<Draw> initial() const;
  /// As `initial`, with the states of this moment.
  std::vector<Draw> now() const;

 private:
  struct Watched {
    at::Generator generator;
    GeneratorState initial;
    GeneratorState expected;  // what ops have left
    bool moved() const { return !(GeneratorState(generator) == expected); }
  };

  std::vector<Watched> watched_;
  bool drew_ = false;
  bool strayed_ = false;
};

}  // namespace infinitybatch::tape
