// Which storages move: held by nobody else, made by the device's allocator.
#include "offload/store.hpp"
#include "support.hpp"

#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include <vector>

namespace infinitybatch::offload {
namespace {

using offload_test::handles;
using offload_test::kCpu;
using offload_test::live;

class MovableTest : public testing::Test {
 protected:
  /// What `put` says and does, which must agree with `movable` and the allocator's counter.
  void expect(const std::vector<at::Tensor>& tensors, Others others, int64_t moves, int64_t held,
              int64_t not_ours = 0) {
    const Movable before = store_.movable(tensors, others);
    EXPECT_EQ(before.moves, moves);
    EXPECT_EQ(before.held_by_others, held);
    EXPECT_EQ(before.not_ours, not_ours);
    EXPECT_EQ(before.stays(), held + not_ours);
    const int64_t live_before = live();
    Offloaded offloaded = store_.put(tensors, others);
    EXPECT_EQ(offloaded.bytes().moves, moves);
    EXPECT_EQ(offloaded.bytes().stays(), held + not_ours);
    EXPECT_EQ(live_before - live(), moves);
    EXPECT_EQ(offloaded.away(), moves > 0);
    offloaded.bring_back();
    EXPECT_EQ(live(), live_before);
  }

  Store store_{kCpu, {.host_bytes = 1 << 20, .disk = false}};
};

TEST_F(MovableTest, WhatTheGivenHandlesAloneHold) {
  expect(handles(at::ones({100}), at::ones({10, 10}, at::kDouble)), Others::none, 1200, 0);
}

TEST_F(MovableTest, EachStorageOnce) {
  const at::Tensor base = at::ones({10, 20});
  const std::vector<at::Tensor> tensors = {base, base.t(), base.view({200}).slice(0, 3, 90, 2),
                                           base.select(1, 2).expand({5, 10})};
  expect(tensors, Others::handles, 800, 0);
}

TEST_F(MovableTest, AHandleElsewhereHoldsATensor) {
  const at::Tensor mine = at::ones({100});
  expect(handles(mine, at::ones({5})), Others::none, 20, 400);
  expect(handles(mine, at::ones({5})), Others::handles, 420, 0);
}

TEST_F(MovableTest, AHandleThatIsGivenTwiceIsNotElsewhere) {
  std::vector<at::Tensor> twice = handles(at::ones({100}));
  twice.push_back(twice[0]);
  expect(twice, Others::none, 400, 0);
  const at::Tensor view = twice[0].view({10, 10});
  expect(twice, Others::handles, 0, 400);
}

TEST_F(MovableTest, AnotherTensorHoldsAStorage) {
  const at::Tensor base = at::ones({100});
  expect(handles(base.slice(0, 0, 10)), Others::none, 0, 400);
  expect(handles(base.slice(0, 0, 10)), Others::handles, 0, 400);
  expect(handles(base.slice(0, 0, 10)), Others::tensors, 400, 0);
  const c10::Storage storage = at::ones({10}).storage();
  expect(handles(at::empty({0}, at::kFloat).set_(storage, 0, {10}, {1})), Others::handles, 0, 40);
}

TEST_F(MovableTest, AParameterAndWhatLiesOnIt) {
  const at::Tensor parameter = at::ones({100}).set_requires_grad(true);
  expect(handles(parameter), Others::none, 0, 400);
  expect(handles(parameter.detach()), Others::none, 0, 400);
  expect(handles(parameter.detach().view({10, 10})), Others::handles, 0, 400);
}

TEST_F(MovableTest, AGraphHoldsWhatItSaved) {
  const at::Tensor x = at::ones({100}).set_requires_grad(true);
  const std::vector<at::Tensor> results = handles(x.exp());
  const at::Tensor sum = results[0].sum();
  expect(results, Others::none, 0, 400);
  expect(results, Others::tensors, 400, 0);
}

TEST_F(MovableTest, NotWhatAnotherAllocatorMade) {
  std::vector<float> numbers(100);
  c10::Allocator* ours = c10::GetCPUAllocator();
  c10::SetAllocator(c10::DeviceType::CPU, c10::GetDefaultCPUAllocator());
  const at::Tensor older = at::ones({50});
  c10::SetAllocator(c10::DeviceType::CPU, ours);
  expect(handles(at::from_blob(numbers.data(), {100}, at::kFloat), older), Others::tensors, 0, 0,
         600);
}

TEST_F(MovableTest, NothingOfOtherTensors) {
  const at::Tensor sparse = at::eye(3).to_sparse();
  const at::Tensor meta = at::empty({100}, at::TensorOptions().device(at::kMeta));
  expect({at::Tensor(), at::empty({0}, at::kFloat), at::empty({3, 0, 2}, at::kFloat), meta, sparse},
         Others::tensors, 0, 0);
}

TEST_F(MovableTest, StoragesThatTheCallerAnswersFor) {
  const at::Tensor a = at::ones({100});
  const at::Tensor b = at::full({30}, 2.0F);
  std::vector<float> numbers(100);
  const at::Tensor foreign = at::from_blob(numbers.data(), {100}, at::kFloat);
  const int64_t before = live();
  Offloaded offloaded =
      store_.put(std::vector<c10::Storage>{a.storage(), b.storage(), a.storage(), foreign.storage(),
                                           at::Tensor(at::empty({0})).storage()});
  EXPECT_EQ(offloaded.bytes().moves, 520);
  EXPECT_EQ(offloaded.bytes().not_ours, 400);
  EXPECT_EQ(before - live(), 520);
  offloaded.bring_back();
  EXPECT_TRUE(a.equal(at::ones({100})));
  EXPECT_TRUE(b.equal(at::full({30}, 2.0F)));
}

TEST_F(MovableTest, ConjugatesAndNegativesAreTheirMemory) {
  const auto options = at::TensorOptions(at::kComplexFloat);
  std::vector<at::Tensor> tensors = handles(at::randn({10}, options));
  tensors.push_back(tensors[0].conj());
  const at::Tensor expected = tensors[1].clone();
  Offloaded offloaded = store_.put(tensors, Others::handles);
  EXPECT_EQ(offloaded.bytes().moves, 80);
  offloaded.bring_back();
  EXPECT_TRUE(tensors[1].equal(expected));
}

}  // namespace
}  // namespace infinitybatch::offload
