#include <infinitybatch/core/out_of_memory.hpp>

#include <c10/util/Exception.h>

#include <utility>
#include <vector>

namespace infinitybatch {
namespace {

using Classifier = std::function<bool(const std::exception_ptr&)>;

std::vector<Classifier>& classifiers() {
  static std::vector<Classifier> list;
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
  for (const Classifier& classifier : classifiers()) {
    if (classifier(error)) return true;
  }
  return false;
}

void register_out_of_memory(Classifier classifier) {
  classifiers().push_back(std::move(classifier));
}

}  // namespace infinitybatch
