#include "exactness/exactness.hpp"

#include <cstdlib>
#include <string_view>

namespace infinitybatch::testing {
namespace {

/// How many families see each row of the criterion table: all of them for all strategies are
/// 160,000 tests, which take two hours on two cores.
size_t families_each(size_t all) {
  const char* asked = std::getenv("INFINITYBATCH_LONG_TESTS");
  if (asked == nullptr) return 3;
  return std::string_view(asked) == "all" ? all : 6;
}

/// Shapes are tiny: a second thread only waits, and makes rounding depend on the machine.
class OneThread : public ::testing::Environment {
  void SetUp() override { at::set_num_threads(1); }
};
::testing::Environment* const one_thread = ::testing::AddGlobalTestEnvironment(new OneThread);

}  // namespace

const std::vector<Pair>& pairs() {
  static const std::vector<Pair> all = [] {
    std::vector<Pair> rows;
    const size_t count = families().size();
    const size_t each = families_each(count);
    size_t next = 0;
    for (const CriterionCase& criterion : criterion_cases()) {
      for (size_t i = 0; i < each; ++i) rows.push_back({&families()[next++ % count], &criterion});
    }
    return rows;
  }();
  return all;
}

const CriterionCase& criterion_named(const std::string& name) {
  for (const CriterionCase& criterion : criterion_cases()) {
    if (criterion.name == name) return criterion;
  }
  throw std::out_of_range("no criterion is called " + name);
}

}  // namespace infinitybatch::testing
