// A tape that is cut anywhere gives the bits of the whole.
#include "tape/recorder.hpp"
#include "tape/segment.hpp"

#include <infinitybatch/core/errors.hpp>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>

namespace infinitybatch::tape {
namespace {

namespace nn = torch::nn;
using Forward = std::function<at::Tensor(const at::Tensor&)>;

struct Case {
  std::string name;
  std::vector<at::Tensor> parameters;
  Forward forward;
  at::Tensor input;
  std::vector<at::Tensor> buffers = {};
};

at::Tensor parameter(std::vector<int64_t> shape) {
  return at::randn(shape, at::kDouble).requires_grad_();
}

Case in_place() {
  const at::Tensor a = parameter({6, 6}), b = parameter({6, 6});
  return {"in_place",
          {a, b},
          [=](const at::Tensor& x) {
            at::Tensor h = at::linear(x, a).relu_();
            const at::Tensor skip = h * 2;
            h = at::linear(h, b).add_(skip).sigmoid_();
            return h.mul(skip).sum(1);
          },
          at::randn({4, 6}, at::kDouble)};
}

Case views() {
  const at::Tensor a = parameter({6, 6});
  return {"views",
          {a},
          [=](const at::Tensor& x) {
            const at::Tensor h = at::linear(x, a);
            const auto halves = h.chunk(2, 1);
            const at::Tensor left = halves[0].exp() + halves[1];
            return (h.t().matmul(left)).sin().sum(0);
          },
          at::randn({4, 6}, at::kDouble)};
}

Case dropout() {
  const at::Tensor a = parameter({6, 6}), b = parameter({6, 6});
  return {"dropout",
          {a, b},
          [=](const at::Tensor& x) {
            at::Tensor h = at::dropout(at::linear(x, a), 0.4, true);
            h = at::dropout(at::linear(h, b).tanh(), 0.3, true);
            return h.sum(1);
          },
          at::randn({4, 6}, at::kDouble)};
}

Case modes() {
  const at::Tensor a = parameter({6, 6}), b = parameter({6, 6});
  return {"modes",
          {a, b},
          [=](const at::Tensor& x) {
            const at::Tensor h = at::linear(x, a);
            at::Tensor target;
            {
              const at::NoGradGuard no_grad;
              target = at::linear(h, b).relu();
            }
            return (at::linear(h, b) - target).square().sum(1);
          },
          at::randn({4, 6}, at::kDouble)};
}

Case written_buffer() {
  const at::Tensor a = parameter({6, 6});
  const at::Tensor count = at::zeros({}, at::kDouble);
  return {"written_buffer",
          {a},
          [=](const at::Tensor& x) {
            count.add_(1);
            const at::Tensor h = at::linear(x, a) * count.clone();
            count.add_(1);
            return (h * count.clone()).sum(1);
          },
          at::randn({4, 6}, at::kDouble),
          {count}};
}

std::vector<at::Tensor> gradients_of(const Case& with) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : with.parameters) {
    gradients.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
    at::Tensor(parameter).mutable_grad().reset();
  }
  return gradients;
}

/// Plays all segments forward, then each again from its detached frontier, last first.
void play_in_segments(const Tape& tape, const std::vector<Segment>& segments, const Batch& inputs,
                      const at::Tensor& gradient) {
  std::map<Crossing, at::Tensor> waiting, sums;
  std::vector<std::vector<Draw>> random{tape.initial};
  const auto run = [&](size_t s, std::vector<std::pair<Crossing, at::Tensor>>& leaves) {
    std::vector<at::Tensor> values(tape.value_count);
    for (const Take& take : segments[s].takes) {
      at::Tensor value;
      if (take.from.giver < 0) {
        for (const External& external : tape.externals) {
          if (external.value == take.from.value) value = external.before;
        }
      } else {
        const at::Tensor& kept = waiting.at(take.from);
        value = kept.detach().requires_grad_(kept.requires_grad());
        if (value.requires_grad()) leaves.emplace_back(take.from, value);
      }
      values[take.from.value] = take.written ? value.clone() : value;
    }
    std::vector<Draw> states = random[s];
    play(tape, segments[s], inputs, values, states, nullptr);
    if (random.size() == s + 1) random.push_back(states);
    return values;
  };
  for (size_t s = 0; s < segments.size(); ++s) {
    std::vector<std::pair<Crossing, at::Tensor>> leaves;
    const std::vector<at::Tensor> values = run(s, leaves);
    for (const ValueId value : segments[s].gives) {
      const at::Tensor kept = values[value].detach();
      waiting[{value, static_cast<int32_t>(s)}] =
          kept.requires_grad_(values[value].requires_grad());
    }
  }
  for (size_t s = segments.size(); s-- > 0;) {
    std::vector<std::pair<Crossing, at::Tensor>> leaves;
    const std::vector<at::Tensor> values = run(s, leaves);
    std::vector<at::Tensor> roots, gradients;
    if (s + 1 == segments.size()) {
      const at::Tensor output = result_of(tape, values).tensors().front();
      if (output.requires_grad()) {
        roots.push_back(output);
        gradients.push_back(gradient);
      }
    }
    for (const ValueId value : segments[s].gives) {
      const auto sum = sums.find({value, static_cast<int32_t>(s)});
      if (sum == sums.end()) continue;
      roots.push_back(values[value]);
      gradients.push_back(sum->second);
    }
    if (!roots.empty()) torch::autograd::backward(roots, gradients);
    for (const auto& [crossing, leaf] : leaves) {
      if (!leaf.grad().defined()) continue;
      at::Tensor& sum = sums[crossing];
      sum = sum.defined() ? sum + leaf.grad() : leaf.grad();
    }
  }
}

class Segments : public testing::TestWithParam<int> {};

TEST_P(Segments, CutAnywhereGivesTheSameGradient) {
  torch::manual_seed(7);
  const std::vector<Case> cases{in_place(), views(), dropout(), modes(), written_buffer()};
  const Case& with = cases[static_cast<size_t>(GetParam())];
  const Batch inputs(with.input);
  at::Tensor output;
  Recorder recorder(inputs, with.buffers, {at::kCPU});
  output = recorder.run([&] { return with.forward(with.input); });
  const Tape tape = recorder.finish(Batch(output));
  ASSERT_FALSE(tape.opaque) << *tape.opaque;
  const at::Tensor gradient = at::randn_like(output.detach());
  const Batch whole = replay(tape, inputs);
  torch::autograd::backward({whole.tensors().front()}, {gradient});
  const std::vector<at::Tensor> wanted = gradients_of(with);
  int tried = 0;
  const auto ops = static_cast<uint32_t>(tape.ops.size());
  for (uint32_t a = 1; a < ops; ++a) {
    for (uint32_t b = a; b < ops; ++b) {
      std::vector<Cut> cuts{{a}};
      if (b > a) cuts.push_back({b});
      std::vector<Segment> segments;
      try {
        segments = cut(tape, cuts);
      } catch (const Unsupported&) {
        continue;  // aliases of what is changed later
      }
      ++tried;
      play_in_segments(tape, segments, inputs, gradient);
      const std::vector<at::Tensor> found = gradients_of(with);
      for (size_t i = 0; i < wanted.size(); ++i) {
        EXPECT_TRUE(at::allclose(found[i], wanted[i], 1e-14, 1e-16))
            << with.name << " cut at " << a << ", " << b << "\n"
            << tape.describe();
      }
    }
  }
  EXPECT_GT(tried, 3);
}

INSTANTIATE_TEST_SUITE_P(Tapes, Segments, testing::Range(0, 5));

/// A counter in a buffer is left there by the recording; a scale that forward reads is not.
TEST(Trim, LeavesOutWhatBuffersAreLeftWith) {
  const at::Tensor counter = at::zeros({}), scale = at::ones({});
  const Batch inputs(at::randn({3, 4}));
  Recorder recorder(inputs, {counter, scale}, {at::kCPU});
  const at::Tensor output = recorder.run([&] {
    counter.add_(1);
    scale.mul_(2);
    const at::Tensor result = inputs.tensors().front() * scale;
    scale.mul_(2);
    return result;
  });
  const Tape tape = recorder.finish(Batch(output), /*trimmed=*/false);
  const auto trimmed = [&](const std::function<bool(const Op&)>& may_go) {
    Tape copy = tape;
    trim(copy, may_go);
    EXPECT_TRUE(at::equal(replay(copy, inputs).tensors().front(), output));
    return copy.ops.size();
  };
  EXPECT_EQ(trimmed(nullptr), 4);
  EXPECT_EQ(trimmed([](const Op&) { return false; }), 4);
  EXPECT_EQ(trimmed([](const Op&) { return true; }), 2);
}

TEST(Segments, AnAliasOfWhatIsChangedLaterIsNoPlaceToCut) {
  const at::Tensor weight = parameter({4, 4});
  const Batch inputs(at::randn({3, 4}, at::kDouble));
  Recorder recorder(inputs, {}, {at::kCPU});
  const at::Tensor output = recorder.run([&] {
    const at::Tensor h = at::linear(inputs.tensors().front(), weight);
    const at::Tensor view = h.view({12});
    const at::Tensor other = weight.sum();
    h.add_(other);
    return view * 2 + h.view({12});
  });
  const Tape tape = recorder.finish(Batch(output));
  ASSERT_FALSE(tape.opaque) << *tape.opaque;
  bool refused = false;
  for (uint32_t at = 1; at < tape.ops.size(); ++at) {
    try {
      cut(tape, {{at}});
    } catch (const Unsupported& error) {
      refused = true;
      EXPECT_NE(std::string(error.what()).find("aten::add_"), std::string::npos);
    }
  }
  EXPECT_TRUE(refused);
}

TEST(Segments, ADifferenceBetweenRecordingsIsNamed) {
  const at::Tensor weight = parameter({4, 4});
  const Batch inputs(at::randn({3, 4}, at::kDouble));
  const auto record = [&](double factor, bool more) {
    Recorder recorder(inputs, {}, {at::kCPU});
    const at::Tensor output = recorder.run([&] {
      at::Tensor h = at::linear(inputs.tensors().front(), weight).clamp_min(factor);
      if (more) h = h.relu();
      return h;
    });
    return recorder.finish(Batch(output));
  };
  EXPECT_FALSE(difference(record(1, false), record(1, false)).has_value());
  EXPECT_NE(difference(record(1, false), record(2, false))->find("aten::clamp_min with other"),
            std::string::npos);
  EXPECT_NE(difference(record(1, false), record(1, true))->find("aten::relu ran the second"),
            std::string::npos);
}

}  // namespace
}  // namespace infinitybatch::tape
