#pragma once

#include "exactness/oracle.hpp"
#include "execute/schedule.hpp"
#include "loss/criterion_cases.hpp"

#include <infinitybatch/infinitybatch.hpp>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <string>
#include <vector>

// The conformance suite that every strategy passes. A strategy is a type with
//     static std::string name();                 // StepReport::strategy
//     static StepReport run(const Model& model, const SeparableLoss& loss, const Batch& inputs,
//                           const Batch& targets, int64_t samples, int64_t micro_batch_size);
// and its whole test file is
//     const bool registered = register_exactness<MyStrategy>();
// It may say `static std::vector<std::string> names()`, what StepReport::strategy may be, in place
// of being held to one forward for each micro-batch, `static bool takes(const Family&)`, and, where
// memory falls with the micro-batch size, `third_step`, which takes three steps.
namespace infinitybatch::testing {

struct Sizes {
  int64_t samples;
  int64_t micro_batch_size;
};

/// One by one, even, uneven, larger than N, and a single sample.
inline const std::vector<Sizes>& all_sizes() {
  static const std::vector<Sizes> sizes = {{6, 1}, {6, 2}, {7, 3}, {5, 9}, {1, 1}, {1, 4}};
  return sizes;
}

struct Pair {
  const Family* family;
  const CriterionCase* criterion;
};

/// Every criterion in every hard case, each on a few families that change from row to row; with
/// INFINITYBATCH_LONG_TESTS on twice as many, with INFINITYBATCH_LONG_TESTS=all on all of them.
const std::vector<Pair>& pairs();

/// \throws std::out_of_range for a name that is none
const CriterionCase& criterion_named(const std::string& name);

inline void expect_none(const std::vector<Excess>& values) {
  for (const Excess& value : values) EXPECT_LE(value.found, value.allowed) << value.name;
}

/// Takes the look at the same rows out: more samples than a micro-batch has (all, where there is
/// room; else as many at four places), then two or three parts of the smallest micro-batch's size,
/// or up to 16 single samples.
inline void forget_look(std::vector<int64_t>& ran, const std::vector<int64_t>& sizes) {
  // The last one: before it one forward on other rows may tell how outputs follow them.
  auto look = ran.end();
  while (look != ran.begin() && *--look <= sizes.front()) {
  }
  if (look == ran.end() || *look <= sizes.front()) return;
  const int64_t parts = sizes.front() == 1         ? std::min<int64_t>(*look, 16)
                        : *look - sizes.back() > 1 ? 3
                                                   : 2;
  const std::ptrdiff_t count = parts + 1;
  auto first = look;
  while (first - ran.begin() >= count && *(first - count) == *look) first -= count;
  // A first run at moved values gave infinities, so that the model's own were looked at.
  if (first != ran.begin() && *(first - 1) == *look) --first;
  ran.erase(first, look + std::min<std::ptrdiff_t>(count, ran.end() - look));
}

/// Cost and bookkeeping: one forward for each micro-batch, of the sizes that were asked for. Where
/// a strategy has two passes a family that no tape can keep has a second one, and says so.
template <typename Strategy>
void expect_cost(Subject& subject, const StepReport& report, const Sizes& sizes) {
  const std::vector<int64_t> wanted = split_by(sizes.samples, sizes.micro_batch_size);
  std::vector<int64_t> ran = subject.take_forwards();
  if constexpr (requires { Strategy::names(); }) {  // which has tests of its own for what it costs
    const std::vector<std::string> names = Strategy::names();
    EXPECT_EQ(std::count(names.begin(), names.end(), report.strategy), 1) << report.strategy;
    subject.take_ambiguity();
    return;
  }
  if constexpr (requires { Strategy::looks; })
    ran.erase(ran.begin(), ran.begin() + Strategy::looks);
  forget_look(ran, wanted);
  bool rerun = false;
  if constexpr (requires { Strategy::two_passes; }) {
    rerun = report.strategy == "rerun";
    // Time in front of one sample: two and one of them tell whether both are one dimension.
    if (sizes.micro_batch_size == 1 && ran.size() >= wanted.size() + 2 && ran[1] == 2 &&
        ran[2] == 1) {
      ran.erase(ran.begin() + 1, ran.begin() + 3);
    }
    // One forward on other rows tells, once for each kind of batch.
    const bool looked = ran.size() > wanted.size() && ran[1] != ran[0];
    if (subject.take_ambiguity() && looked) ran.erase(ran.begin() + 1);
  }
  if (rerun) {
    EXPECT_GT(ran.size(), wanted.size());
    EXPECT_LE(ran.size(), 2 * wanted.size());
    ran.resize(std::min(ran.size(), wanted.size()));
  } else {
    EXPECT_EQ(report.strategy, Strategy::name());
  }
  EXPECT_EQ(ran, wanted);
  EXPECT_EQ(report.micro_batch_sizes, wanted);
}

template <typename Strategy>
StepReport run_strategy(const std::shared_ptr<Subject>& subject, const CriterionCase& criterion,
                        const Data& data, const Sizes& sizes, at::ScalarType type, bool autocast) {
  subject->drop_gradients();
  subject->take_forwards();
  const MaybeAutocast casting(autocast);
  const StepReport report =
      Strategy::run(Model(subject), criterion.loss(at::TensorOptions(type)), data.inputs,
                    data.targets, sizes.samples, sizes.micro_batch_size);
  expect_cost<Strategy>(*subject, report, sizes);
  EXPECT_EQ(report.restarts, 0);
  EXPECT_EQ(report.loss.dim(), 0);
  EXPECT_FALSE(report.loss.requires_grad());
  return report;
}

template <typename Strategy>
class ExactInDouble : public ::testing::Test {
 public:
  explicit ExactInDouble(Pair pair) : pair_(pair) {}

  void TestBody() override {
    const auto& [family, criterion] = pair_;
    const auto subject = make_subject(*family, *criterion, at::kDouble, 11);
    for (const Sizes& sizes : all_sizes()) {
      SCOPED_TRACE("N=" + std::to_string(sizes.samples) +
                   ", micro_batch_size=" + std::to_string(sizes.micro_batch_size));
      const Data data = make_data(*family, *criterion, sizes.samples, at::kDouble, 23);
      const Gradients reference = native(*subject, *criterion, data, false);
      const Gradients moved = native(*subject, *criterion, reversed(data), false);
      const StepReport report =
          run_strategy<Strategy>(subject, *criterion, data, sizes, at::kDouble, false);
      EXPECT_EQ(report.loss.scalar_type(), at::kDouble);
      expect_none(excess_in_double(gradients_of(*subject, report.loss), reference, moved));
    }
  }

 private:
  Pair pair_;
};

template <typename Strategy>
class ExactInFloat : public ::testing::Test {
 public:
  explicit ExactInFloat(Pair pair) : pair_(pair) {}

  void TestBody() override {
    const auto& [family, criterion] = pair_;
    const auto subject = make_subject(*family, *criterion, at::kFloat, 11);
    const auto exact = make_subject(*family, *criterion, at::kDouble, 11);
    for (const Sizes& sizes : all_sizes()) {
      SCOPED_TRACE("N=" + std::to_string(sizes.samples) +
                   ", micro_batch_size=" + std::to_string(sizes.micro_batch_size));
      const Data data = make_data(*family, *criterion, sizes.samples, at::kFloat, 23);
      const Data wide = make_data(*family, *criterion, sizes.samples, at::kDouble, 23);
      const Gradients reference = native(*exact, *criterion, wide, false);
      const StepReport report =
          run_strategy<Strategy>(subject, *criterion, data, sizes, at::kFloat, family->autocast);
      const Gradients found = gradients_of(*subject, report.loss);
      if constexpr (requires { Strategy::kThreads; }) at::set_num_threads(Strategy::kThreads);
      expect_none(excess_in_single(found, reference, family->autocast ? at::kBFloat16 : at::kFloat,
                                   sizes.samples, [&](const Way& way) {
                                     return native(*subject, *criterion, data, family->autocast,
                                                   way);
                                   }));
      at::set_num_threads(1);
    }
  }

 private:
  Pair pair_;
};

/// The more micro-batches, the less memory: for every family. Of a second step: the first one looks
/// at rows in some 256 KiB, which is more than these tiny models need.
template <typename Strategy>
class PeakFalls : public ::testing::Test {
 public:
  explicit PeakFalls(const Family& family) : family_(family) {}

  void TestBody() override {
    const CriterionCase& criterion = criterion_named("mse_loss/plain_mean");
    constexpr int64_t kSamples = 96;
    const auto subject = make_subject(family_, criterion, at::kFloat, 11);
    const Data data = make_data(family_, criterion, kSamples, at::kFloat, 23);
    std::vector<int64_t> peaks;
    for (const int64_t size : {96, 24, 6}) {
      run_strategy<Strategy>(subject, criterion, data, {kSamples, size}, at::kFloat,
                             family_.autocast);
      subject->drop_gradients();
      const MaybeAutocast casting(family_.autocast);
      const StepReport report =
          Strategy::third_step(Model(subject), criterion.loss(at::TensorOptions(at::kFloat)),
                               data.inputs, data.targets, size);
      peaks.push_back(report.peak_bytes - memory::stats(at::kCPU).live);
    }
    // Above what the step leaves behind: a quarter of the samples takes two thirds at most.
    EXPECT_LT(peaks[1], 0.65 * static_cast<double>(peaks[0]));
    EXPECT_LT(peaks[2], peaks[1]);
  }

 private:
  const Family& family_;
};

/// Which rows of the table a strategy takes.
struct TableRows {
  size_t every = 1;
  size_t first = 0;
};

/// One in so many rows in an ordinary run; every one in a long run.
inline size_t one_in(size_t ordinary) {
  return std::getenv("INFINITYBATCH_LONG_TESTS") != nullptr ? 1 : ordinary;
}

/// Enters every row into gtest's list; call it once a strategy, before tests run.
template <typename Strategy>
bool register_exactness(const TableRows& rows = {}) {
  const auto add = [](const std::string& kind, const std::string& name, auto make) {
    const std::string suite = Strategy::name() + "_" + kind;
    ::testing::RegisterTest(suite.c_str(), name.c_str(), nullptr, nullptr, __FILE__, __LINE__,
                            std::move(make));
  };
  size_t row = 0;
  for (const Pair& pair : pairs()) {
    if constexpr (requires { Strategy::takes(*pair.family); }) {
      if (!Strategy::takes(*pair.family)) continue;
    }
    if (row++ % rows.every != rows.first % rows.every) continue;
    const std::string name = pair.family->name + "__" + test_name(*pair.criterion);
    if (!pair.family->autocast) {  // which leaves float64 alone
      add("fp64", name, [pair]() -> ::testing::Test* { return new ExactInDouble<Strategy>(pair); });
    }
    add(pair.family->autocast ? "autocast" : "fp32", name,
        [pair]() -> ::testing::Test* { return new ExactInFloat<Strategy>(pair); });
  }
  if constexpr (requires { &Strategy::third_step; }) {
    for (const Family& family : families()) {
      add("peak_falls", family.name,
          [&family]() -> ::testing::Test* { return new PeakFalls<Strategy>(family); });
    }
  }
  return true;
}

}  // namespace infinitybatch::testing
