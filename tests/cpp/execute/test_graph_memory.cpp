// What a graph has saved leaves the device and is found again by backward.
#include "execute/graph_memory.hpp"

#include <infinitybatch/memory/statistics.hpp>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>
#include <vector>

namespace infinitybatch {
namespace {

constexpr int64_t kBytes = 8 * 16 * 4;  // of a tensor of the forward below

at::Tensor random(at::IntArrayRef sizes) {
  return at::randn(sizes);
}

struct Forward {
  at::Tensor weight = random({16, 16}).requires_grad_();
  at::Tensor outside;  // a view of what is saved, in somebody else's hands

  Batch operator()(const at::Tensor& x) {
    const at::Tensor h = at::tanh(at::mm(x, weight));
    outside = h.detach();
    // Saved as it is, and as two views.
    return Batch(at::mul(h, h.t().sin().t()).add_(h.view({-1}).exp().view_as(h)));
  }
};

offload::Store host() {
  return offload::Store(at::kCPU, {.host_bytes = 1 << 20, .disk = false});
}

at::Tensor gradient(const Forward& forward, const Batch& outputs) {
  at::Tensor weight = forward.weight;
  weight.mutable_grad() = at::Tensor();
  outputs.leaves()[0].tensor.sum().backward();
  return weight.grad().clone();
}

TEST(GraphMemory, LeavesAndComesBackBitForBit) {
  const at::Tensor x = random({8, 16});
  Forward forward;
  const at::Tensor wanted = gradient(forward, forward(x));
  offload::Store store = host();
  for (const bool beside : {false, true}) {
    GraphMemory memory;
    Batch outputs = memory.watch([&] { return forward(x); });
    forward.outside.reset();
    const auto version = outputs.leaves()[0].tensor._version();
    const int64_t before = memory::stats(at::kCPU).live;
    if (beside) {
      EXPECT_GT(memory.start_leaving(store, {}), 0);
    }
    memory.offload(store, {});
    // h, its sine, the exponential and the output: each once, and nothing of x or the weight.
    EXPECT_EQ(memory.bytes().offloaded, 4 * kBytes);
    EXPECT_EQ(memory.bytes().stayed, 0);
    EXPECT_EQ(before - memory::stats(at::kCPU).live, 4 * kBytes);
    EXPECT_EQ(store.statistics().host_bytes, 4 * kBytes);
    EXPECT_THROW(outputs.leaves()[0].tensor.sum(), c10::Error);
    if (beside) {
      EXPECT_EQ(memory.fetch(/*ahead=*/true), 4 * kBytes);
    }
    EXPECT_EQ(memory.fetch(/*ahead=*/false), beside ? 0 : 4 * kBytes);
    EXPECT_EQ(memory::stats(at::kCPU).live, before);
    EXPECT_EQ(store.statistics().host_bytes, 0);
    EXPECT_EQ(outputs.leaves()[0].tensor._version(), version);
    EXPECT_TRUE(at::equal(gradient(forward, outputs), wanted));
  }
}

TEST(GraphMemory, PartsOfWhatForwardWasGivenStay) {
  const at::Tensor dense = at::eye(16).add(at::eye(16).roll(1, 0));
  const std::vector<at::Tensor> adjacencies = {dense.to_sparse(), dense.to_sparse_csr(),
                                               dense.to_mkldnn(),
                                               at::quantize_per_tensor(dense, 0.1, 0, at::kQInt8)};
  const at::Tensor x = random({16, 8}).requires_grad_();
  for (const at::Tensor& adjacency : adjacencies) {
    const auto forward = [&] {
      const bool sparse = adjacency.is_sparse() || adjacency.layout() == at::kSparseCsr;
      const at::Tensor h = at::tanh(x);
      if (sparse) return Batch(at::mm(adjacency, h).sin());
      const at::Tensor read =
          adjacency.is_quantized() ? adjacency.dequantize() : adjacency.to_dense();
      return Batch(at::mm(read, h).sin());
    };
    const at::Tensor wanted =
        torch::autograd::grad({forward().leaves()[0].tensor.sum()}, {x}).front();
    offload::Store store = host();
    GraphMemory memory;
    Batch outputs = memory.watch(forward);
    EXPECT_GT(memory.offload(store, {}), 0);
    const at::Tensor still =
        adjacency.is_quantized() ? adjacency.dequantize() : adjacency.to_dense();
    EXPECT_TRUE(at::allclose(still, dense, 0, 1e-6));
    memory.fetch(/*ahead=*/false);
    const at::Tensor found = torch::autograd::grad({outputs.leaves()[0].tensor.sum()}, {x}).front();
    EXPECT_TRUE(at::equal(found, wanted));
  }
}

TEST(GraphMemory, WhatOthersHoldOutlivesTheGraph) {
  const at::Tensor x = random({8, 16});
  Forward forward;
  const at::Tensor wanted = forward(x).leaves()[0].tensor.detach().clone();
  offload::Store store = host();
  at::Tensor kept;
  {
    GraphMemory memory;
    const Batch outputs = memory.watch([&] { return forward(x); });
    kept = outputs.leaves()[0].tensor.variable_data();
    memory.offload(store, {});
    EXPECT_THROW(kept.sum(), c10::Error);
  }
  EXPECT_TRUE(at::equal(kept, wanted));
  EXPECT_EQ(store.statistics().host_bytes, 0);
}

TEST(GraphMemory, WhatOthersUseStays) {
  const at::Tensor x = random({8, 16});
  Forward forward;
  offload::Store store = host();
  GraphMemory memory;
  Batch outputs = memory.watch([&] { return forward(x); });
  memory.offload(store, {forward.outside.storage().unsafeGetStorageImpl()});
  EXPECT_EQ(memory.bytes().offloaded, 3 * kBytes);
  EXPECT_EQ(memory.bytes().stayed, kBytes);
  EXPECT_TRUE(forward.outside.abs().sum().item<float>() > 0);
}

TEST(GraphMemory, OutputsThatOthersSeeBecomeCopies) {
  const at::Tensor x = random({8, 16});
  Forward forward;
  const at::Tensor wanted = gradient(forward, forward(x));
  offload::Store store = host();
  GraphMemory memory;
  Batch graph = memory.watch([&] { return forward(x); });
  forward.outside.reset();
  Batch seen(graph.leaves()[0].tensor.detach());
  const at::Tensor values = seen.leaves()[0].tensor.clone();
  EXPECT_EQ(offload_graph(memory, store, graph, seen), 4 * kBytes);
  EXPECT_TRUE(at::equal(seen.leaves()[0].tensor, values));
  memory.fetch(/*ahead=*/false);
  EXPECT_TRUE(at::equal(gradient(forward, graph), wanted));
}

TEST(GraphMemory, InputsThatWereMadeForItBelongToIt) {
  Forward forward;
  offload::Store store = host();
  for (const bool shared : {false, true}) {
    GraphMemory memory;
    Batch inputs(random({8, 16}));
    const at::Tensor whole = shared ? inputs.leaves()[0].tensor.detach() : at::Tensor();
    memory.know(inputs);
    Batch outputs = memory.watch([&] { return forward(at::Tensor(inputs.leaves()[0].tensor)); });
    forward.outside.reset();
    inputs = Batch();
    memory.offload(store, {});
    EXPECT_EQ(memory.bytes().offloaded, (shared ? 4 : 5) * kBytes);
    if (shared) {
      EXPECT_TRUE(whole.abs().sum().item<float>() > 0);
    }
  }
}

TEST(GraphMemory, AnythingLetGoOfWhileItIsAwayIsGone) {
  const at::Tensor x = random({8, 16});
  Forward forward;
  offload::Store store = host();
  const int64_t before = memory::stats(at::kCPU).live;
  {
    GraphMemory memory;
    Batch outputs = memory.watch([&] { return forward(x); });
    forward.outside.reset();
    memory.offload(store, {});
    outputs = Batch();
    memory.fetch(/*ahead=*/false);
  }
  EXPECT_EQ(memory::stats(at::kCPU).live, before);
  EXPECT_EQ(store.statistics().host_bytes, 0);
}

}  // namespace
}  // namespace infinitybatch
