#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace infinitybatch {

/// A vector that its copies share until one of them is changed, and that others with the same
/// elements may come to share.
template <typename T>
class SharedVector {
 public:
  using value_type = T;
  /// Finds the elements for as long as a vector has them.
  using Known = std::weak_ptr<std::vector<T>>;

  const std::vector<T>& all() const noexcept { return all_ ? *all_ : kNone; }
  operator const std::vector<T>&() const noexcept { return all(); }
  const T& operator[](size_t index) const noexcept { return (*all_)[index]; }
  const T& back() const noexcept { return all_->back(); }
  size_t size() const noexcept { return all_ ? all_->size() : 0; }
  bool empty() const noexcept { return size() == 0; }
  const T* data() const noexcept { return all().data(); }
  auto begin() const noexcept { return all().begin(); }
  auto end() const noexcept { return all().end(); }

  /// For changes: of this vector alone.
  std::vector<T>& own() {
    if (!all_) {
      all_ = std::make_shared<std::vector<T>>();
    } else if (known_ || all_.use_count() > 1) {  // others may be reading
      all_ = std::make_shared<std::vector<T>>(*all_);
    }
    known_ = false;
    return *all_;
  }
  void push_back(T value) { own().push_back(std::move(value)); }

  /// Shares `known`'s elements where they are the same; else these are known from now on.
  /// \param same `bool(const T&, const T&)`
  /// \returns whether it did
  template <typename Same>
  bool share(Known& known, Same&& same) {
    if (empty()) return false;
    known_ = true;
    const std::shared_ptr<std::vector<T>> others = known.lock();
    if (others && std::equal(all_->begin(), all_->end(), others->begin(), others->end(), same)) {
      all_ = others;
      return true;
    }
    known = all_;
    return false;
  }

  bool operator==(const SharedVector& other) const { return all() == other.all(); }

 private:
  inline static const std::vector<T> kNone;

  std::shared_ptr<std::vector<T>> all_;
  bool known_ = false;  ///< a `Known` may find them
};

}  // namespace infinitybatch
