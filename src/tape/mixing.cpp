#include "tape/mixing.hpp"

#include "tape/draws.hpp"
#include "tape/flow.hpp"
#include "tape/player.hpp"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

namespace infinitybatch::tape {
namespace {

/// How many numbers these draw depends on values, so that one sample's shift the others'.
bool draws_by_values(const OpFacts& facts) {
  constexpr std::array<std::string_view, 9> kNames{"aten::poisson",
                                                   "aten::binomial",
                                                   "aten::_standard_gamma",
                                                   "aten::_sample_dirichlet",
                                                   "aten::rrelu",
                                                   "aten::rrelu_",
                                                   "aten::rrelu_with_noise",
                                                   "aten::rrelu_with_noise_",
                                                   "aten::rrelu_with_noise_functional"};
  return std::find(kNames.begin(), kNames.end(), facts.name()) != kNames.end();
}

/// A size depends on values: the numbers that the recording holds belong to other sizes.
struct OtherSizes {};

template <typename Visit>
void for_each_result(const std::vector<c10::IValue>& results, Visit&& visit) {
  for (const c10::IValue& result : results) {
    if (result.isTensor()) {
      visit(result.toTensor());
    } else if (result.isTensorList()) {
      for (const c10::IValue& element : result.toListRef()) visit(element.toTensor());
    }
  }
}

/// Compares the sizes of all results with those of the first run.
class Sizes {
 public:
  void begin() { next_ = 0; }
  void end() { known_ = true; }
  void meet(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.layout() != at::kStrided) return meet(-1);
    meet(tensor.dim());
    for (const int64_t size : tensor.sizes()) meet(size);
  }

 private:
  void meet(int64_t number) {
    if (!known_) return sizes_.push_back(number);
    if (next_ == sizes_.size() || sizes_[next_++] != number) throw OtherSizes();
  }

  std::vector<int64_t> sizes_;
  size_t next_ = 0;
  bool known_ = false;
};

/// One way through the tape.
class Way final : public PlayObserver {
 public:
  /// \param order null: the rows as they are
  Way(const Tape& tape, const Batch& inputs, const std::vector<int64_t>* order,
      const SettledOp& settled, Sizes* sizes)
      : tape_(tape),
        order_(order),
        settled_(settled),
        sizes_(sizes),
        values_(tape.value_count),
        random_(tape.initial),
        player_(tape, values_, /*restored=*/0, this, /*graph=*/false) {
    for (const External& external : tape.externals) {
      at::Tensor tensor = Player::found(external, inputs);
      if (order != nullptr && external.input_leaf >= 0) {
        const Leaf& leaf = inputs.leaves()[static_cast<size_t>(external.input_leaf)];
        if (leaf.batch_dim != Leaf::kShared) tensor = exchanged(tensor, leaf.batch_dim, *order);
      }
      player_.bind(external, std::move(tensor));
    }
    if (sizes_ != nullptr) sizes_->begin();
  }

  bool stand_in(uint32_t op, std::vector<c10::IValue>& stack) override {
    return settled_ && settled_(op, stack, order_);
  }

  void after(uint32_t /*op*/, const std::vector<c10::IValue>& results) override {
    if (sizes_ != nullptr) {
      for_each_result(results, [&](const at::Tensor& tensor) { sizes_->meet(tensor); });
    } else {
      results_.clear();
      for_each_result(results, [&](const at::Tensor& tensor) { results_.push_back(tensor); });
    }
  }

  Batch to_end() {
    set_states(random_);
    player_.play({0, static_cast<uint32_t>(tape_.ops.size())}, /*first=*/nullptr);
    return result_of(tape_, values_);
  }

  /// One op, beside other ways that draw the same numbers. Its results.
  const std::vector<at::Tensor>& step(uint32_t op) {
    results_.clear();
    const OpFacts* facts = tape_.ops[op].facts;
    const bool draws = facts != nullptr && facts->draws;
    if (draws) set_states(random_);
    player_.play({op, op + 1}, /*first=*/nullptr);
    if (draws) {
      for (Draw& draw : random_) draw.state = GeneratorState(draw.generator);
    }
    return results_;
  }

 private:
  const Tape& tape_;
  const std::vector<int64_t>* order_;
  const SettledOp& settled_;
  Sizes* sizes_;
  std::vector<at::Tensor> values_;
  std::vector<Draw> random_;
  std::vector<at::Tensor> results_;
  Player player_;
};

/// Casts that were made without a graph are nobody's to find.
struct CastsGuard {
  CastsGuard() { at::autocast::clear_cache(); }
  ~CastsGuard() { at::autocast::clear_cache(); }
};

class Search {
 public:
  Search(const Tape& tape, const Batch& inputs, const Exchanges& exchanges,
         const SettledOp& settled)
      : tape_(tape), inputs_(inputs), exchanges_(exchanges), settled_(settled) {}

  std::optional<size_t> mixed_output(const std::vector<bool>& compared) {
    Sizes sizes;
    const auto go = [&](const std::vector<int64_t>* order) {
      return Way(tape_, inputs_, order, settled_, &sizes).to_end();
    };
    Batch as_is = go(nullptr);
    sizes.end();
    for (size_t i = 0; i < as_is.leaves().size(); ++i) {
      at::Tensor& tensor = as_is.leaves()[i].tensor;
      if (i >= compared.size() || !compared[i] || !counts(tensor)) tensor.reset();
    }
    const std::vector<at::Tensor> by_others = differ(as_is, go(&exchanges_.others));
    const std::vector<at::Tensor> by_itself = differ(as_is, go(&exchanges_.itself));
    for (size_t i = 0; i < by_others.size(); ++i) {
      const at::Tensor& tensor = as_is.leaves()[i].tensor;
      if (tensor.defined() && mixes(by_others[i], by_itself[i], tensor.sizes(), exchanges_)) {
        return i;
      }
    }
    return std::nullopt;
  }

  std::string first_op(size_t output) {
    std::vector<bool> one(tape_.result_values.size(), false);
    one[output] = true;
    const std::vector<bool> leads = lead_to(tape_, one);
    Way as_is(tape_, inputs_, nullptr, settled_, nullptr);
    Way others(tape_, inputs_, &exchanges_.others, settled_, nullptr);
    Way itself(tape_, inputs_, &exchanges_.itself, settled_, nullptr);
    for (uint32_t i = 0; i < tape_.ops.size(); ++i) {
      const auto& a = as_is.step(i);
      const auto& b = others.step(i);
      const auto& c = itself.step(i);
      if (!leads[i]) continue;
      for (size_t r = 0; r < a.size() && r < b.size() && r < c.size(); ++r) {
        const at::Tensor by_others = differences(a[r], b[r], exchanges_.rows);
        const at::Tensor by_itself = differences(a[r], c[r], exchanges_.rows);
        if ((by_others.defined() || by_itself.defined()) &&
            mixes(by_others, by_itself, a[r].sizes(), exchanges_)) {
          return tape_.ops[i].facts->name();
        }
      }
    }
    return "forward";
  }

 private:
  bool counts(const at::Tensor& tensor) const {
    if (!tensor.defined() || tensor.dim() == 0) return false;
    const auto sizes = tensor.sizes();
    const bool follows = std::find(sizes.begin(), sizes.end(), exchanges_.rows) != sizes.end();
    return follows || (sizes.size() > 1 && sizes[0] > 0 && sizes[0] % exchanges_.rows == 0);
  }

  std::vector<at::Tensor> differ(const Batch& as_is, const Batch& now) const {
    std::vector<at::Tensor> found;
    for (size_t i = 0; i < as_is.leaves().size(); ++i) {
      found.push_back(
          differences(as_is.leaves()[i].tensor, now.leaves()[i].tensor, exchanges_.rows));
    }
    return found;
  }

  const Tape& tape_;
  const Batch& inputs_;
  const Exchanges& exchanges_;
  const SettledOp& settled_;
};

}  // namespace

std::optional<Mixing> find_mixing(const Tape& tape, const Batch& inputs, const Exchanges& exchanges,
                                  const std::vector<bool>& compared, const SettledOp& settled) {
  const bool unsteady = std::any_of(tape.ops.begin(), tape.ops.end(), [](const Op& op) {
    return op.facts != nullptr && draws_by_values(*op.facts);
  });
  if (tape.opaque || tape.refusal || unsteady) return std::nullopt;
  const at::NoGradGuard no_grad;
  const ModesGuard modes;
  const GeneratorsGuard generators(tape);
  const CastsGuard casts;
  Search search(tape, inputs, exchanges, settled);
  std::optional<size_t> output;
  try {
    output = search.mixed_output(compared);
  } catch (const OtherSizes&) {
    return std::nullopt;
  }
  if (!output) return std::nullopt;
  try {
    return Mixing{search.first_op(*output), *output};
  } catch (const c10::Error&) {
    return Mixing{"forward", *output};  // no memory for three ways side by side
  }
}

}  // namespace infinitybatch::tape
