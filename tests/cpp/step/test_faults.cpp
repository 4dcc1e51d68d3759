// Contract 3: a step that fails anywhere leaves everything as it was, and the next one works.
#include "memory/failure_injection.hpp"
#include "step/world.hpp"

namespace infinitybatch::testing {
namespace {

constexpr int64_t kMicroBatch = 4;

Options with_fixed_size(const World& world) {
  Options options = world.options();
  options.micro_batch_size = kMicroBatch;
  return options;
}

/// Room for any micro-batch: what fails, fails on purpose.
Options with_budget(const World& world) {
  Options options = world.options();
  options.memory_budget = memory::stats(at::kCPU).live + (int64_t{16} << 20);
  return options;
}

at::Tensor step(VirtualBatch& batch, const World& world) {
  return batch.backward(world.inputs(), world.targets()).loss;
}

/// A step without any fault, and how many allocations and places of user code it has.
struct Undisturbed {
  Outcome outcome;
  int64_t allocations, places_of_user_code;
};

Undisturbed undisturbed(const std::string& kind, Randomness randomness,
                        Options (*options)(const World&)) {
  {  // kernels that run for the first time allocate what they keep
    const World warm_up(kind, randomness);
    VirtualBatch batch(warm_up.model(), warm_up.loss(), options(warm_up));
    step(batch, warm_up);
  }
  const World world(kind, randomness);
  VirtualBatch batch(world.model(), world.loss(), options(world));
  const memory::FailAllocation counting(memory::FailAllocation::kNever);
  const Tripwires wires(Tripwires::kNever);
  const at::Tensor loss = step(batch, world);
  const int64_t allocations = counting.seen(), passes = wires.seen();
  return {Outcome(world, loss), allocations, passes};
}

Outcome native(const std::string& kind) {
  World world(kind, Randomness::harmless);
  const at::Tensor loss = world.native();
  return {world, loss};
}

class Faults : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { at::set_num_threads(1); }
};

TEST_P(Faults, AFixedSizeStepSurvivesAFailureOfAnyAllocation) {
  const Undisturbed reference = undisturbed(GetParam(), Randomness::dropout, with_fixed_size);
  ASSERT_GT(reference.allocations, 100);
  for (const int64_t place : places(reference.allocations)) {
    SCOPED_TRACE("allocation " + std::to_string(place) + " of " +
                 std::to_string(reference.allocations));
    const World world(GetParam(), Randomness::dropout);
    VirtualBatch batch(world.model(), world.loss(), with_fixed_size(world));
    const Snapshot before(world);
    {
      const memory::FailAllocation failure(place);
      try {  // a look that finds no room looks at less
        expect_same_bits({world, step(batch, world)}, reference.outcome);
        continue;
      } catch (const c10::OutOfMemoryError&) {
      }
    }
    before.expect_unchanged();
    expect_same_bits({world, step(batch, world)}, reference.outcome);
    if (HasFailure()) return;
  }
}

TEST_P(Faults, AFixedSizeStepSurvivesAnExceptionAnywhereInUserCode) {
  const Undisturbed reference = undisturbed(GetParam(), Randomness::dropout, with_fixed_size);
  ASSERT_GT(reference.places_of_user_code, 30);
  for (int64_t place = 1; place <= reference.places_of_user_code; ++place) {
    SCOPED_TRACE("place " + std::to_string(place) + " of " +
                 std::to_string(reference.places_of_user_code));
    const World world(GetParam(), Randomness::dropout);
    VirtualBatch batch(world.model(), world.loss(), with_fixed_size(world));
    const Snapshot before(world);
    {
      const Tripwires wires(place);
      EXPECT_THROW(step(batch, world), Tripped);
    }
    before.expect_unchanged();
    expect_same_bits({world, step(batch, world)}, reference.outcome);
    if (HasFailure()) return;
  }
}

// Here memory that runs out may be answered by a smaller plan: then the gradient is exact and the
// report says so.
TEST_P(Faults, ABudgetedStepSurvivesAFailureOfAnyAllocation) {
  const Undisturbed reference = undisturbed(GetParam(), Randomness::harmless, with_budget);
  const Outcome exact = native(GetParam());
  int64_t restarted = 0;
  for (const int64_t place : places(reference.allocations)) {
    SCOPED_TRACE("allocation " + std::to_string(place) + " of " +
                 std::to_string(reference.allocations));
    const World world(GetParam(), Randomness::harmless);
    VirtualBatch batch(world.model(), world.loss(), with_budget(world));
    const Snapshot before(world);
    at::Tensor loss;
    try {
      const memory::FailAllocation failure(place);
      const StepReport report = batch.backward(world.inputs(), world.targets());
      // Which sizes a step times depends on the clock: it may end before the place is reached.
      if (failure.failed() && report.restarts > 0) ++restarted;  // else a look found no room
      loss = report.loss;
    } catch (const c10::OutOfMemoryError&) {
      before.expect_unchanged();
      loss = step(batch, world);
    } catch (const BudgetExceeded&) {
      before.expect_unchanged();
      loss = step(batch, world);
    }
    expect_exact({world, loss}, exact);
    if (HasFailure()) return;
  }
  EXPECT_GT(restarted, 50);
}

TEST_P(Faults, ABudgetedStepSurvivesAnExceptionAnywhereInUserCode) {
  const Undisturbed reference = undisturbed(GetParam(), Randomness::harmless, with_budget);
  const Outcome exact = native(GetParam());
  for (int64_t place = 1; place <= reference.places_of_user_code; ++place) {
    SCOPED_TRACE("place " + std::to_string(place) + " of " +
                 std::to_string(reference.places_of_user_code));
    const World world(GetParam(), Randomness::harmless);
    VirtualBatch batch(world.model(), world.loss(), with_budget(world));
    const Snapshot before(world);
    at::Tensor loss;
    try {
      const Tripwires wires(place);
      loss = step(batch, world);
      EXPECT_LT(wires.seen(), place);  // the clock let it end before
    } catch (const Tripped&) {
      before.expect_unchanged();
      loss = step(batch, world);
    }
    expect_exact({world, loss}, exact);
    if (HasFailure()) return;
  }
}

// A plan is a rehearsal: it changes nothing, whether it works or not.
TEST_P(Faults, APlanChangesNothing) {
  const World world(GetParam(), Randomness::dropout);
  VirtualBatch batch(world.model(), world.loss(), with_budget(world));
  const Snapshot before(world);
  EXPECT_GT(batch.plan(world.inputs(), world.targets()).micro_batch_size(), 0);
  before.expect_unchanged();
  {
    const Tripwires wires(20);
    EXPECT_THROW(batch.plan(world.inputs(), world.targets()), Tripped);
  }
  before.expect_unchanged();
}

INSTANTIATE_TEST_SUITE_P(Step, Faults, ::testing::ValuesIn(World::kinds()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace infinitybatch::testing
