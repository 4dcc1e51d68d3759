// Tapes of micro-batches hold what is the same in them together.
#include "tape/recorder.hpp"

#include <gtest/gtest.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <functional>

namespace infinitybatch::tape {
namespace {

const at::Tensor& weight() {
  static const at::Tensor made = at::randn({6, 6}, at::kDouble).requires_grad_();
  return made;
}

Tape record(const std::function<at::Tensor(const at::Tensor&)>& forward, int64_t rows = 4) {
  weight();  // made before
  const Batch inputs = Batch(at::randn({rows, 6}, at::kDouble));
  Recorder recorder(inputs, {}, {at::Device(at::kCPU)});
  const Batch outputs =
      recorder.run([&] { return Batch(forward(inputs.leaves().front().tensor)); });
  Tape tape = recorder.finish(outputs);
  EXPECT_FALSE(tape.opaque) << *tape.opaque;
  share_with_last(tape);
  return tape;
}

/// How many of their arrays are the same ones.
int shared(const Tape& a, const Tape& b) {
  return std::apply(
      [&](const auto&... of_a) {
        return std::apply(
            [&](const auto&... of_b) {
              return (0 + ... + int{!of_a.empty() && of_a.data() == of_b.data()});
            },
            shared_arrays(b));
      },
      shared_arrays(a));
}

constexpr int kAll = 11;  // without elements of lists of tensors, of which there are none

TEST(Sharing, OfEqualProgramsIsOfAllArrays) {
  const auto forward = [](const at::Tensor& x) { return at::linear(x, weight()).tanh() * 2; };
  const Tape first = record(forward);
  const Tape second = record(forward);
  EXPECT_EQ(shared(first, second), kAll);
  const Tape third = record(forward);
  EXPECT_EQ(shared(first, third), kAll);
}

TEST(Sharing, LeavesOtherNumbersApart) {
  double factor = 2;
  const auto forward = [&](const at::Tensor& x) { return at::linear(x, weight()) * factor++; };
  const Tape first = record(forward);
  const Tape second = record(forward);
  EXPECT_EQ(shared(first, second), kAll - 1);
  const Batch inputs = Batch(at::randn({4, 6}, at::kDouble));
  const at::Tensor plain = at::linear(inputs.leaves().front().tensor, weight());
  EXPECT_TRUE(replay(first, inputs).leaves().front().tensor.equal(plain * 2));
  EXPECT_TRUE(replay(second, inputs).leaves().front().tensor.equal(plain * 3));
}

TEST(Sharing, LeavesOtherZerosOfComplexNumbersApart) {
  double imaginary = 0.0;
  const auto forward = [&](const at::Tensor& x) {
    const c10::complex<double> number(-1.0, imaginary);
    imaginary = -0.0;
    return at::linear(x, weight()).mul(number).log();
  };
  const Tape first = record(forward);
  const Tape second = record(forward);
  EXPECT_EQ(first.ops.data(), second.ops.data());
  EXPECT_NE(first.arguments.data(), second.arguments.data());
}

TEST(Sharing, LeavesOtherFoundTensorsApart) {
  const at::Tensor other = at::randn({6, 6}, at::kDouble);
  const Tape first = record([](const at::Tensor& x) { return at::linear(x, weight()); });
  const Tape second = record([&](const at::Tensor& x) { return at::linear(x, other); });
  EXPECT_EQ(shared(first, second), kAll - 1);
}

TEST(Sharing, LeavesOtherRandomStatesApart) {
  const auto forward = [](const at::Tensor& x) {
    return at::dropout(at::linear(x, weight()), 0.5, true);
  };
  const Tape first = record(forward);
  const Tape second = record(forward);
  EXPECT_EQ(shared(first, second), kAll);
  ASSERT_EQ(first.initial.size(), 1u);
  EXPECT_FALSE(first.initial[0].state == second.initial[0].state);
}

TEST(Sharing, LeavesOtherGeneratorsApart) {
  const auto forward = [](const at::Tensor& x) {
    at::Generator generator = at::detail::createCPUGenerator(7);
    return at::linear(x, weight()) + at::rand({6}, generator, x.options());
  };
  const Tape first = record(forward);
  const Tape second = record(forward);
  EXPECT_NE(first.arguments.data(), second.arguments.data());
  EXPECT_EQ(first.ops.data(), second.ops.data());
}

at::Tensor with_integers(const at::Tensor& x, at::IntArrayRef) {
  return x.clone();
}
at::Tensor with_numbers(const at::Tensor& x, at::ArrayRef<double>) {
  return x.clone();
}
TORCH_LIBRARY(sharing_tests, library) {
  library.def("with_integers(Tensor x, int[] numbers) -> Tensor");
  library.def("with_numbers(Tensor x, float[] numbers) -> Tensor");
}
TORCH_LIBRARY_IMPL(sharing_tests, CompositeExplicitAutograd, library) {
  library.impl("with_integers", with_integers);
  library.impl("with_numbers", with_numbers);
}

TEST(Sharing, LeavesEmptyListsOfOtherKindsApart) {
  const auto call = [](const char* name, const c10::IValue& numbers) {
    return [=](const at::Tensor& x) {
      std::vector<c10::IValue> stack{x, numbers};
      c10::Dispatcher::singleton()
          .findSchemaOrThrow((std::string("sharing_tests::") + name).c_str(), "")
          .callBoxed(&stack);
      return stack.front().toTensor();
    };
  };
  const Tape first = record(call("with_integers", c10::List<int64_t>()));
  const Tape second = record(call("with_numbers", c10::List<double>()));
  EXPECT_EQ(first.slots.data(), second.slots.data());
  EXPECT_NE(first.arguments.data(), second.arguments.data());
}

/// Another thread may be comparing them.
TEST(Sharing, IsOfArraysThatNobodyChanges) {
  SharedVector<int> numbers, others;
  SharedVector<int>::Known known;
  numbers.push_back(1);
  others.push_back(1);
  const int* const place = numbers.data();
  EXPECT_FALSE(numbers.share(known, std::equal_to<>()));
  EXPECT_TRUE(others.share(known, std::equal_to<>()));
  EXPECT_EQ(others.data(), place);
  others = {};
  const std::vector<int>& own = numbers.own();
  EXPECT_NE(own.data(), place);
  EXPECT_TRUE(known.expired());
}

TEST(Sharing, EndsWithTheTapes) {
  const auto forward = [](const at::Tensor& x) { return at::linear(x, weight()); };
  const size_t before = weight().use_count();
  record(forward);
  EXPECT_EQ(weight().use_count(), before) << "nothing holds what the tapes held";
}

TEST(Sharing, OfACopyEndsWhereItIsChanged) {
  const Tape first = record([](const at::Tensor& x) { return at::linear(x, weight()); });
  Tape copy = first;
  EXPECT_EQ(shared(first, copy), kAll);
  copy.externals.own().clear();
  EXPECT_FALSE(first.externals.empty());
  EXPECT_EQ(shared(first, copy), kAll - 1);
}

}  // namespace
}  // namespace infinitybatch::tape
