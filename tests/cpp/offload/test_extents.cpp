#include "offload/extents.hpp"

#include <infinitybatch/core/errors.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace infinitybatch::offload {
namespace {

void expect(const std::vector<Extent>& extents, std::vector<std::pair<int64_t, int64_t>> expected) {
  std::vector<std::pair<int64_t, int64_t>> found;
  for (const Extent& extent : extents) found.emplace_back(extent.begin, extent.bytes);
  EXPECT_EQ(found, expected);
}

TEST(Extents, AreAlignedAndInOrder) {
  Extents extents(1000, 64);
  EXPECT_EQ(extents.capacity(), 960);
  expect(extents.take(1), {{0, 64}});
  expect(extents.take(65), {{64, 128}});
  EXPECT_EQ(extents.used(), 192);
  expect(extents.take(0), {});
  expect(extents.take(769), {});
  EXPECT_EQ(extents.used(), 192) << "what does not fit takes nothing";
  expect(extents.take(768), {{192, 768}});
  EXPECT_EQ(extents.free(), 0);
  expect(extents.take(1), {});
}

TEST(Extents, TakeTheSmallestHoleThatHolds) {
  Extents extents(64 * 20, 64);
  std::vector<std::vector<Extent>> taken;
  for (const int64_t units : {4, 1, 2, 1, 3, 1}) taken.push_back(extents.take(64 * units));
  extents.give_back(taken[0]);  // 4 units at 0
  extents.give_back(taken[2]);  // 2 units at 5
  extents.give_back(taken[4]);  // 3 units at 8
  expect(extents.take(64 * 3), {{64 * 8, 64 * 3}});
  expect(extents.take(64 * 1), {{64 * 5, 64}});
  expect(extents.take(64 * 5), {{64 * 12, 64 * 5}});
}

TEST(Extents, AreScatteredWhereNoHoleHolds) {
  Extents extents(64 * 10, 64);
  std::vector<std::vector<Extent>> taken;
  for (const int64_t units : {2, 1, 3, 1, 3}) taken.push_back(extents.take(64 * units));
  extents.give_back(taken[0]);
  extents.give_back(taken[2]);
  // The largest hole, then the smallest that holds the rest.
  expect(extents.take(64 * 4), {{64 * 3, 64 * 3}, {0, 64}});
  expect(extents.take(64 * 2), {});
  EXPECT_EQ(extents.free(), 64);
}

TEST(Extents, JoinWithTheirNeighbours) {
  Extents extents(64 * 4, 64);
  std::vector<std::vector<Extent>> taken;
  for (int i = 0; i < 4; ++i) taken.push_back(extents.take(64));
  for (const int i : {0, 2, 1, 3}) extents.give_back(taken[i]);
  expect(extents.holes(), {{0, 64 * 4}});
}

TEST(Extents, RefuseMisuse) {
  EXPECT_THROW(Extents(-1, 64), InvalidArgument);
  EXPECT_THROW(Extents(64, 0), InvalidArgument);
  EXPECT_THROW(Extents(64, 48), InvalidArgument);
  Extents nothing(63, 64);
  expect(nothing.take(1), {});
}

/// One mark for each unit, nothing else.
class Model {
 public:
  explicit Model(size_t units) : taken_(units, false) {}

  int64_t free() const { return std::count(taken_.begin(), taken_.end(), false); }
  /// Lengths of all holes.
  std::vector<Extent> holes() const {
    std::vector<Extent> result;
    for (size_t i = 0; i < taken_.size(); ++i) {
      if (taken_[i]) continue;
      if (i == 0 || taken_[i - 1]) result.push_back({static_cast<int64_t>(i), 0});
      ++result.back().bytes;
    }
    return result;
  }
  void mark(const Extent& extent, int64_t unit, bool taken) {
    for (int64_t i = extent.begin / unit; i < (extent.begin + extent.bytes) / unit; ++i) {
      ASSERT_NE(taken_.at(static_cast<size_t>(i)), taken) << "unit " << i;
      taken_[static_cast<size_t>(i)] = taken;
    }
  }

 private:
  std::vector<bool> taken_;
};

TEST(Extents, AgreeWithANaiveModelInRandomOrder) {
  constexpr int64_t kUnit = 64;
  int scattered = 0;
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    const auto units = static_cast<int64_t>(50 + random() % 400);
    Extents extents(units * kUnit + 63, kUnit);
    Model model(static_cast<size_t>(units));
    std::vector<std::vector<Extent>> out;
    for (int step = 0; step < 2000; ++step) {
      if (out.empty() || random() % 5 < 3) {
        const auto bytes = static_cast<int64_t>(1 + random() % (units * kUnit / 6));
        const int64_t needed = (bytes + kUnit - 1) / kUnit;
        int64_t best = 0;
        for (const Extent& hole : model.holes()) {
          if (hole.bytes >= needed && (best == 0 || hole.bytes < best)) best = hole.bytes;
        }
        const std::vector<Extent> holes = extents.holes();
        const std::vector<Extent> taken = extents.take(bytes);
        ASSERT_EQ(taken.empty(), needed > model.free());
        int64_t sum = 0;
        for (const Extent& extent : taken) {
          ASSERT_EQ(extent.begin % kUnit, 0);
          sum += extent.bytes;
          model.mark(extent, kUnit, true);
        }
        if (!taken.empty()) {
          ASSERT_EQ(sum, needed * kUnit);
          ASSERT_EQ(taken.size() == 1, best > 0) << "scattered only where no hole holds it";
          if (taken.size() == 1) {
            const auto hole = std::find_if(holes.begin(), holes.end(), [&](const Extent& one) {
              return one.begin == taken[0].begin;
            });
            ASSERT_NE(hole, holes.end());
            ASSERT_EQ(hole->bytes, best * kUnit);
          }
          scattered += taken.size() > 1;
          out.push_back(taken);
        }
      } else {
        const size_t i = random() % out.size();
        for (const Extent& extent : out[i]) model.mark(extent, kUnit, false);
        extents.give_back(out[i]);
        out.erase(out.begin() + static_cast<std::ptrdiff_t>(i));
      }
      ASSERT_EQ(extents.free(), model.free() * kUnit);
      const std::vector<Extent> expected = model.holes();
      ASSERT_EQ(extents.holes().size(), expected.size()) << "neighbouring holes are one";
      for (size_t i = 0; i < expected.size(); ++i) {
        ASSERT_EQ(extents.holes()[i].begin, expected[i].begin * kUnit);
        ASSERT_EQ(extents.holes()[i].bytes, expected[i].bytes * kUnit);
      }
    }
  }
  EXPECT_GT(scattered, 100);
}

}  // namespace
}  // namespace infinitybatch::offload
