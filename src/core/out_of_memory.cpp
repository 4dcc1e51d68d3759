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

std::string& last_refusal() {
  thread_local std::string text;
  return text;
}

}  // namespace

void note_refusal(std::string text) {
  last_refusal() = std::move(text);
}

bool tells_refusal(std::string_view text) {
  const std::string& refusal = last_refusal();
  return !refusal.empty() && text.find(refusal) != std::string_view::npos;
}

bool is_out_of_memory(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::OutOfMemoryError&) {
    return true;
  } catch (...) {
  }
  if (classifiers().any(error)) return true;
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& other) {
    return tells_refusal(other.what());
  } catch (...) {
    return false;
  }
}

void register_out_of_memory(std::function<bool(const std::exception_ptr&)> classifier) {
  classifiers().add(std::move(classifier));
}

}  // namespace infinitybatch
