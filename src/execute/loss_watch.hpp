#pragma once

#include "core/callback_errors.hpp"
#include "tape/op_bus.hpp"

#include <ATen/core/TensorBody.h>

#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

namespace infinitybatch {

/// Watches the ops of a loss of all outputs, in this thread: what it reads, and which of the
/// outputs it is about to change in place. What writes memory without an op (a kernel of the user's
/// that is no operator) is not seen.
class LossWatch final : public tape::OpListener {
 public:
  /// \param watched outputs as the loss gets them; undefined ones are left out
  /// \param write   called with the index of each of them in front of the first op that writes its
  ///                memory
  /// \param read    called with every tensor that an op is about to read or write
  LossWatch(const std::vector<at::Tensor>& watched, std::function<void(size_t)> write,
            std::function<void(const at::Tensor&)> read);
  LossWatch(const LossWatch&) = delete;
  LossWatch& operator=(const LossWatch&) = delete;

  /// \throws what `write` or `read` threw first, which torch keeps to itself
  void rethrow() { errors_.rethrow(); }

 private:
  std::unique_ptr<tape::OpContext> begin(const tape::SeenOp& op) noexcept override;
  void meet(const tape::SeenOp& op);
  void meet_read(const at::Tensor& tensor);
  void meet_write(const at::Tensor& tensor);

  std::unordered_multimap<const c10::StorageImpl*, size_t> unwritten_;
  std::function<void(size_t)> write_;
  std::function<void(const at::Tensor&)> read_;
  CallbackErrors errors_;
  const tape::OpBus::Scope listening_;
};

}  // namespace infinitybatch
