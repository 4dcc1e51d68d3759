#include <infinitybatch/coupled/row_errors.hpp>

#include <algorithm>
#include <utility>
#include <vector>

namespace infinitybatch::coupled {
namespace {

using Classifier = std::function<bool(const std::exception_ptr&)>;

std::vector<Classifier>& classifiers() {
  static std::vector<Classifier> list;
  return list;
}

}  // namespace

bool may_be_of_rows(const std::exception_ptr& error) {
  return std::none_of(classifiers().begin(), classifiers().end(),
                      [&](const Classifier& ends_the_step) { return ends_the_step(error); });
}

void register_row_errors(Classifier ends_the_step) {
  classifiers().push_back(std::move(ends_the_step));
}

}  // namespace infinitybatch::coupled
