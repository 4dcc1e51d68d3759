#include "coupled/row_errors.hpp"

#include "core/exception_classifiers.hpp"

#include <utility>

namespace infinitybatch::coupled {
namespace {

ExceptionClassifiers& enders_of_steps() {
  static ExceptionClassifiers list;
  return list;
}

}  // namespace

bool may_be_of_rows(const std::exception_ptr& error) {
  return !enders_of_steps().any(error);
}

void register_row_errors(std::function<bool(const std::exception_ptr&)> ends_the_step) {
  enders_of_steps().add(std::move(ends_the_step));
}

}  // namespace infinitybatch::coupled
