#pragma once

#include <infinitybatch/tape/tape.hpp>

#include <ATen/core/MT19937RNGEngine.h>

#include <optional>
#include <vector>

namespace infinitybatch::tape {

at::Tensor state_of(at::Generator generator);
void set_state(at::Generator generator, const at::Tensor& state);

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
  /// Whether anything was drawn, or seeded, since the beginning.
  bool touched() const;
  const std::vector<Draw>& initial() const noexcept { return initial_; }
  /// As `initial`, with the states of this moment.
  std::vector<Draw> now() const;

 private:
  /// Where a generator stands. The state of the CPU's is 5 kB in a tensor; its engine can be
  /// compared without one.
  struct Position {
    std::optional<at::mt19937_data_pod> engine;
    std::optional<double> spare_double;
    std::optional<float> spare_float;
    at::Tensor state;
    bool operator==(const Position& other) const;
  };
  static Position position_of(at::Generator generator);

  std::vector<Draw> initial_;
  std::vector<Position> expected_;
  bool moved(size_t i) const { return !(position_of(initial_[i].generator) == expected_[i]); }

  bool drew_ = false;
  bool strayed_ = false;
};

}  // namespace infinitybatch::tape
