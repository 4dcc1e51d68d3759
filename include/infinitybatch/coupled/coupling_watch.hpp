#pragma once

#include <infinitybatch/coupled/across_batch.hpp>

#include <ATen/core/TensorBody.h>
#include <ATen/record_function.h>

#include <optional>
#include <string>
#include <vector>

namespace infinitybatch::coupled {

/// An op that mixes the samples of a batch, as it was seen running.
struct CoupledOp {
  std::string op;   ///< "aten::batch_norm"
  std::string why;  ///< what it does to the samples, and the way out
};

/// Notices ops that couple samples: BatchNorm in training mode in any of its spellings, embeddings
/// with `scale_grad_by_freq`, which couple in backward alone, and with `max_norm`, which rewrite
/// their weight. `instance_norm`, which is computed by batch_norm over each sample, is not one of
/// them. Ops inside a compiled region are not dispatched one by one and cannot be seen.
class CouplingWatch {
 public:
  /// Watches the ops of this thread while it lives. Scopes may nest; the innermost sees.
  class Scope {
   public:
    explicit Scope(CouplingWatch& watch);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    CouplingWatch* outer_;
    at::CallbackHandle handle_;
  };

  /// Whether one watches this thread.
  static bool at_work() noexcept;

  /// Coupled ops so far, in order; what one of them calls is not counted again.
  const std::vector<CoupledOp>& seen() const noexcept { return seen_; }
  /// The first of them.
  std::optional<CoupledOp> found() const {
    return seen_.empty() ? std::nullopt : std::optional(seen_.front());
  }
  void forget() {
    seen_.clear();
    functions_.forget();
  }

  /// \throws CouplingError where a coupled op ran on `rows` of `total` samples, but not all of them
  void check(int64_t rows, int64_t total) const;

  /// Puts back weights that an embedding's `max_norm` rewrote, as they were before the first time.
  void undo_writes() const;

 private:
  struct Inside;
  struct Write {
    at::Tensor weight;
    at::Tensor before;
  };
  static std::unique_ptr<at::ObserverContext> on_op(const at::RecordFunction& op);
  static void after_op(const at::RecordFunction& op, at::ObserverContext* context);
  void remember(const at::Tensor& weight);

  AcrossBatchFunctions functions_;
  std::vector<CoupledOp> seen_;
  std::vector<Write> writes_;
  int inside_ = 0;  // ops whose inner ops are not looked at
};

}  // namespace infinitybatch::coupled
