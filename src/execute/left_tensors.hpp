#pragma once

#include <infinitybatch/core/model.hpp>

#include <ATen/core/TensorBody.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace infinitybatch {

/// Values spread over the whole tensor, copied; undefined where they cannot be read like that.
at::Tensor sample_of(const at::Tensor& tensor);
/// Whether they are all there and equal. Waits for the device.
bool same_sample(const at::Tensor& a, const at::Tensor& b);

/// What forwards of parts of a batch left in plain attributes of modules (an auxiliary loss,
/// captured features), where whoever looks after the last of them finds that one's alone, or in a
/// list one of each. Keeps none of their memory.
class LeftTensors {
 public:
  struct Left {
    std::string attribute;  ///< "layers.0.aux"
    bool differs = false;   ///< another forward of this batch left something else there
  };

  /// One forward is over. \param tensors that it put there or wrote into
  void add(const std::vector<NamedParameter>& tensors);
  /// Where this tensor, or a view of it, was left; nothing where it was not, or where it is more.
  std::optional<Left> find(const at::Tensor& tensor) const;
  void clear() {
    places_.clear();
    any_forward_ = false;
  }

 private:
  struct Place {
    /// No other memory is made at its address meanwhile.
    c10::weak_intrusive_ptr<c10::StorageImpl> memory{c10::intrusive_ptr<c10::StorageImpl>()};
    int64_t begin = 0;  // in it, in bytes
    int64_t end = 0;
    // Some of the values of the first one and of the last one.
    at::Tensor first;
    at::Tensor last;
    bool replaced = false;  // more than one forward left something
    bool later = false;     // the first one did not: a list that grows
    bool differs() const;
  };

  std::map<std::string, Place> places_;
  bool any_forward_ = false;
};

}  // namespace infinitybatch
