#pragma once

#include <algorithm>
#include <exception>
#include <functional>
#include <utility>
#include <vector>

namespace infinitybatch {

/// Questions about exceptions that only a binding can answer, as they are of its language.
/// Registered at load time, asked from any thread afterwards.
class ExceptionClassifiers {
 public:
  using Classifier = std::function<bool(const std::exception_ptr&)>;

  void add(Classifier classifier) { classifiers_.push_back(std::move(classifier)); }

  /// Whether one of them says yes.
  bool any(const std::exception_ptr& error) const {
    return std::any_of(classifiers_.begin(), classifiers_.end(),
                       [&](const Classifier& classifier) { return classifier(error); });
  }

 private:
  std::vector<Classifier> classifiers_;
};

}  // namespace infinitybatch
