#include "coupled/random_streams.hpp"

#include <infinitybatch/core/errors.hpp>

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <utility>

namespace infinitybatch::coupled {
namespace {

RandomStreams::Position states_of(const std::vector<at::Generator>& generators) {
  RandomStreams::Position position;
  for (const at::Generator& generator : generators) position.emplace_back(generator);
  return position;
}

/// Puts generators back where it found them.
class Guard {
 public:
  explicit Guard(const std::vector<at::Generator>& generators)
      : generators_(generators), before_(states_of(generators)) {}
  ~Guard() {
    for (size_t i = 0; i < generators_.size(); ++i) before_[i].put_back(generators_[i]);
  }
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

 private:
  const std::vector<at::Generator>& generators_;
  RandomStreams::Position before_;
};

}  // namespace

RandomStreams::RandomStreams(const std::vector<at::Device>& devices) {
  const auto add = [this](at::Device device) {
    const at::Generator& generator = at::globalContext().defaultGenerator(device);
    auto& known = default_.generators;
    if (std::find(known.begin(), known.end(), generator) == known.end()) known.push_back(generator);
  };
  add(at::kCPU);
  for (const at::Device& device : devices) add(device);
  default_.begin = states_of(default_.generators);
  default_.now = default_.begin;
}

void RandomStreams::meet(const tape::Tape& tape) {
  std::vector<at::Generator> met;
  for (const tape::Draw& draw : tape.draws) {
    if (!draw.passed || std::find(met.begin(), met.end(), draw.generator) != met.end()) continue;
    const size_t index = met.size();
    met.push_back(draw.generator);
    if (index == own_.size()) {
      own_.push_back({{draw.generator}, {draw.state}, {draw.state}});
    } else if (!(own_[index].begin.front() == draw.state)) {
      throw CouplingError(
          "torch.Generator",
          "forward draws from a torch.Generator that stands elsewhere for each micro-batch (it is "
          "seeded from what changes from call to call), so match_native_rng does not know the "
          "numbers of the whole batch; make it once, outside of forward, or seed it with the same "
          "number each time");
    }
  }
}

void RandomStreams::rewind() const {
  for (const Stream& own : own_) own.begin.front().put_back(own.generators.front());
}

void RandomStreams::settle() const {
  const auto settle = [](const Stream& stream) {
    for (size_t i = 0; i < stream.generators.size(); ++i) {
      stream.now[i].put_back(stream.generators[i]);
    }
  };
  settle(default_);
  for (const Stream& own : own_) settle(own);
}

bool RandomStreams::untouched() const {
  return states_of(default_.generators) == default_.begin;
}

void RandomStreams::take() {
  default_.now = states_of(default_.generators);
  for (Stream& own : own_) own.now = states_of(own.generators);
}

RandomStreams::Which RandomStreams::which(const std::optional<at::Generator>& given) const {
  if (!given) return kDefault;
  const auto& known = default_.generators;
  if (std::find(known.begin(), known.end(), *given) != known.end()) return kDefault;
  for (size_t i = 0; i < own_.size(); ++i) {
    if (own_[i].generators.front() == *given) return static_cast<Which>(i);
  }
  throw StateError("a generator that no recording has met");
}

const RandomStreams::Position& RandomStreams::position(Which which) const {
  return stream(which).now;
}

void RandomStreams::move(Which which, Position to) {
  stream(which).now = std::move(to);
}

RandomStreams::Position RandomStreams::draw(Which which, const std::optional<at::Generator>& given,
                                            const Position& from,
                                            const std::function<void()>& draw) const {
  const std::vector<at::Generator> generators =
      which < 0 ? default_.generators : std::vector<at::Generator>{*given};
  const Guard guard(generators);
  for (size_t i = 0; i < generators.size(); ++i) from[i].put_back(generators[i]);
  draw();
  return states_of(generators);
}

}  // namespace infinitybatch::coupled
