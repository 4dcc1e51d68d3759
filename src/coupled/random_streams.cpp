#include <infinitybatch/coupled/random_streams.hpp>

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/core/rng.hpp>

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace infinitybatch::coupled {
namespace {

RandomStreams::Position states_of(const std::vector<at::Generator>& generators) {
  RandomStreams::Position position;
  for (const at::Generator& generator : generators) position.push_back(state_of(generator));
  return position;
}

/// Puts generators back where it found them.
class Guard {
 public:
  explicit Guard(const std::vector<at::Generator>& generators)
      : generators_(generators), before_(states_of(generators)) {}
  ~Guard() {
    for (size_t i = 0; i < generators_.size(); ++i) set_state(generators_[i], before_[i]);
  }
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

 private:
  const std::vector<at::Generator>& generators_;
  RandomStreams::Position before_;
};

bool same_state(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

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
    } else if (!same_state(own_[index].begin.front(), draw.state)) {
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
  for (const Stream& own : own_) set_state(own.generators.front(), own.begin.front());
}

void RandomStreams::settle() const {
  const auto settle = [](const Stream& stream) {
    for (size_t i = 0; i < stream.generators.size(); ++i) {
      set_state(stream.generators[i], stream.now[i]);
    }
  };
  settle(default_);
  for (const Stream& own : own_) settle(own);
}

bool RandomStreams::untouched() const {
  const Position now = states_of(default_.generators);
  return std::equal(now.begin(), now.end(), default_.begin.begin(), same_state);
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
  for (size_t i = 0; i < generators.size(); ++i) set_state(generators[i], from[i]);
  draw();
  return states_of(generators);
}

}  // namespace infinitybatch::coupled
