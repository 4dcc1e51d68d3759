// A micro-batch that goes through its segments gives the gradients of one that is not cut, whatever
// it saves at the cuts and wherever that lies.
#include "execute/cut_micro_batch.hpp"
#include "tape/recorder.hpp"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace infinitybatch {
namespace {

const at::TensorOptions kDouble = at::TensorOptions().dtype(at::kDouble);

/// Its hidden value is taken by two segments, so that two gradients are summed at one cut.
struct Network {
  at::Tensor first = torch::randn({6, 5}, kDouble).requires_grad_();
  at::Tensor second = torch::randn({3, 6}, kDouble).requires_grad_();
  Batch inputs = Batch(torch::randn({4, 5}, kDouble));
  at::Tensor gradient = torch::randn({4, 3}, kDouble);

  at::Tensor forward() const {
    const at::Tensor hidden = at::relu(at::linear(inputs.tensors().front(), first));
    const at::Tensor output = at::tanh(at::linear(hidden, second));
    return at::add(output, hidden.narrow(1, 0, 3));
  }
  /// Cut in front of every op but the first.
  std::shared_ptr<const Recorded> record() const {
    tape::Recorder recorder(inputs, {}, {at::kCPU});
    const at::Tensor output = recorder.run([&] { return forward(); });
    const auto recorded = std::make_shared<Recorded>();
    recorded->tape = recorder.finish(Batch(output));
    std::vector<tape::Cut> cuts;
    for (uint32_t op = 1; op < recorded->tape.ops.size(); ++op) cuts.push_back({op});
    recorded->segments = tape::cut(recorded->tape, cuts);
    recorded->note_users();
    return recorded;
  }
  std::vector<at::Tensor> take_gradients() {
    std::vector<at::Tensor> gradients{first.grad(), second.grad()};
    first.mutable_grad().reset();
    second.mutable_grad().reset();
    return gradients;
  }
};

void backward_of(Network& network, CutMicroBatch& micro_batch, int64_t segment) {
  PlayedSegment played = micro_batch.graph_of(network.inputs, segment);
  std::vector<at::Tensor> roots;
  std::vector<at::Tensor> gradients;
  if (micro_batch.is_last(segment)) {
    roots.push_back(tape::result_of(micro_batch.recorded().tape, played.values).tensor());
    gradients.push_back(network.gradient);
  }
  micro_batch.take_gradients(segment, played, roots, gradients);
  torch::autograd::backward(roots, gradients);
  micro_batch.collect(segment, played);
}

/// What lies at the cuts while a micro-batch goes back.
enum class Saves { everything, every_third_cut, what_the_next_takes, nothing };

class CutMicroBatches : public testing::TestWithParam<Saves> {};

TEST_P(CutMicroBatches, GiveTheGradientsOfOneThatIsNotCut) {
  torch::manual_seed(3);
  Network network;
  torch::autograd::backward({network.forward()}, {network.gradient});
  const std::vector<at::Tensor> expected = network.take_gradients();
  offload::StoreOptions options;
  options.host_bytes = 1 << 20;
  options.disk = false;
  offload::Store store(at::kCPU, options);

  CutMicroBatch micro_batch(Rows{0, 4}, network.record(), /*ops=*/nullptr);
  ASSERT_GT(micro_batch.segments(), 4);
  for (int64_t s = 0; s < micro_batch.segments(); ++s) {
    micro_batch.go_through(network.inputs, s);
    const bool leaves =
        GetParam() == Saves::every_third_cut && s % 3 != 0 && !micro_batch.is_last(s);
    if (leaves || GetParam() == Saves::nothing) micro_batch.leave(s);
  }
  for (int64_t s = micro_batch.segments() - 1; s >= 0; --s) {
    if (GetParam() == Saves::nothing) {
      micro_batch.advance_to(network.inputs, s, /*forget=*/true, /*store=*/nullptr);
    } else if (GetParam() == Saves::every_third_cut && !micro_batch.is_last(s) &&
               (s % 3 == 2 || micro_batch.is_last(s + 1))) {
      for (int64_t again = s / 3 * 3; again < s; ++again) {
        micro_batch.go_through(network.inputs, again);
      }
    } else if (GetParam() == Saves::what_the_next_takes) {
      micro_batch.offload_but_for(store, s, /*back=*/true);
    }
    backward_of(network, micro_batch, s);
  }
  const std::vector<at::Tensor> found = network.take_gradients();
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(at::equal(found[i], expected[i]));
  EXPECT_EQ(store.statistics().moved_out > 0, GetParam() == Saves::what_the_next_takes);
}

INSTANTIATE_TEST_SUITE_P(Saved, CutMicroBatches,
                         testing::Values(Saves::everything, Saves::every_third_cut,
                                         Saves::what_the_next_takes, Saves::nothing));

/// Goes back from where it stands at every third cut, up to a segment.
void go_back(Network& network, CutMicroBatch& micro_batch, int64_t end) {
  for (int64_t s = micro_batch.segments() - 1; s >= end; --s) {
    const bool stands = s % 3 == 0 || micro_batch.is_last(s);
    if (!stands && (s % 3 == 2 || micro_batch.is_last(s + 1))) {
      for (int64_t again = s / 3 * 3; again < s; ++again) {
        micro_batch.go_through(network.inputs, again);
      }
    }
    backward_of(network, micro_batch, s);
  }
}

TEST(CutMicroBatchThatFailed, BeginsOnceMore) {
  torch::manual_seed(3);
  Network network;
  torch::autograd::backward({network.forward()}, {network.gradient});
  const std::vector<at::Tensor> expected = network.take_gradients();
  CutMicroBatch micro_batch(Rows{0, 4}, network.record(), /*ops=*/nullptr);
  const auto go_forward = [&] {
    for (int64_t s = 0; s < micro_batch.segments(); ++s) {
      micro_batch.go_through(network.inputs, s);
      if (s % 3 != 0 && !micro_batch.is_last(s)) micro_batch.leave(s);
    }
  };
  const auto expect_gradients = [&] {
    const std::vector<at::Tensor> found = network.take_gradients();
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(at::equal(found[i], expected[i]));
  };
  go_forward();
  for (int round = 0; round < 2; ++round) {
    micro_batch.begin_backward(/*keep=*/true);
    go_back(network, micro_batch, 1);  // stands where it was computed again
    network.take_gradients();
    micro_batch.begin_backward(/*keep=*/true);
    go_back(network, micro_batch, 0);
    expect_gradients();
  }
  micro_batch.begin_backward(/*keep=*/false);
  go_back(network, micro_batch, 2);  // and has let go of what is behind
  network.take_gradients();
  micro_batch.begin_again();
  micro_batch.begin_backward(/*keep=*/false);
  go_forward();
  go_back(network, micro_batch, 0);
  expect_gradients();
}

TEST(CutMicroBatchThatFailed, KeepsNoMoreThanBeforeForAnother) {
  torch::manual_seed(3);
  Network network;
  offload::StoreOptions options;
  options.host_bytes = 1 << 20;
  options.disk = false;
  offload::Store store(at::kCPU, options);
  std::vector<int64_t> bytes;
  for (const bool fails : {false, true}) {
    CutMicroBatch micro_batch(Rows{0, 4}, network.record(), /*ops=*/nullptr);
    for (int64_t s = 0; s < micro_batch.segments(); ++s) {
      micro_batch.go_through(network.inputs, s);
      if (s % 3 != 0 && !micro_batch.is_last(s)) micro_batch.leave(s);
    }
    micro_batch.begin_backward(/*keep=*/true);
    if (fails) {
      // Computed again, and not gone back.
      for (int64_t s = 0; s + 1 < micro_batch.segments(); ++s) {
        micro_batch.go_through(network.inputs, s);
      }
      micro_batch.begin_backward(/*keep=*/true);
    }
    bytes.push_back(micro_batch.finish_offload(store));
  }
  EXPECT_GT(bytes[0], 0);
  EXPECT_EQ(bytes[0], bytes[1]);
}

TEST(BoundaryActivations, AGradientThatSharesItsMemoryIsNoSum) {
  BoundaryActivations boundaries;
  const at::Tensor shared = at::ones(4, kDouble);
  boundaries.add_gradient({0, 0}, shared.narrow(0, 0, 2));
  boundaries.add_gradient({0, 0}, at::ones(2, kDouble));
  EXPECT_TRUE(at::equal(shared, at::ones(4, kDouble)));
  EXPECT_TRUE(at::equal(boundaries.take_gradient({0, 0}), at::full({2}, 2, kDouble)));
  EXPECT_FALSE(boundaries.take_gradient({0, 0}).defined());
}

}  // namespace
}  // namespace infinitybatch
