#include "core/out_of_memory.hpp"

#include "core/exception_classifiers.hpp"

#include <c10/util/Exception.h>

#include <utility>

namespace infinitybatch {
namespace {

ExceptionClassifiers& classifiers() {
  static ExceptionClassifiers list;
  return list;
}

}  // namespace

bool is_out_of_memory(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::OutOfMemoryError&) {
    return true;
  } catch (...) {
  }
  return classifiers().any(error);
}

void register_out_of_memory(std::function<bool(const std::exception_ptr&)> classifier) {
  classifiers().add(std::move(classifier));
}

}  // namespace infinitybatch
