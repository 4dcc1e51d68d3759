#include "coupled/row_errors.hpp"

#include "core/exception_classifiers.hpp"

#include <utility>

namespace infinitybatch::coupled {
namespace {

ExceptionClassifiers& enders_of_steps() {
  static ExceptionClassifiers list;
  return list;
}

ExceptionClassifiers& errors_of_state() {
  static ExceptionClassifiers list;
  return list;
}

}  // namespace

bool may_be_of_state(const std::exception_ptr& error) {
  return errors_of_state().any(error);
}

void register_state_errors(std::function<bool(const std::exception_ptr&)> of_state) {
  errors_of_state().add(std::move(of_state));
}

bool may_be_of_rows(const std::exception_ptr& error) {
  return !enders_of_steps().any(error);
}

void register_row_errors(std::function<bool(const std::exception_ptr&)> ends_the_step) {
  enders_of_steps().add(std::move(ends_the_step));
}

}  // namespace infinitybatch::coupled
