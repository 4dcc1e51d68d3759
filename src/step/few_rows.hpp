#pragma once

#include <infinitybatch/core/errors.hpp>

#include <cstdint>
#include <exception>
#include <string>

namespace infinitybatch {

/// Under a budget, of one kind of batch: forward, or the loss, fails on a few samples, where more
/// of them may go through. Sizes are tried from the whole batch down then.
class FewRows {
 public:
  /// Whether larger micro-batches should be tried.
  /// \param rows  of the micro-batch that failed; 0 where its size was not the reason
  /// \param total of the batch, which fails on its own account
  bool meet(int64_t rows, int64_t total, std::exception_ptr error);
  /// On how many samples it fails; 0 where that is not known.
  int64_t failing() const noexcept { return rows_; }
  /// What fits is too few, and more does not fit. The next batch is tried anew: its data may be
  /// other ones. \throws BudgetExceeded caused by what forward said
  [[noreturn]] void refuse(int64_t total, const BudgetExceeded& why);
  void forget_error() noexcept { error_ = nullptr; }
  /// One step. When it is over its exceptions are let go of: they may hold tensors, and whoever
  /// called this.
  class Step {
   public:
    explicit Step(FewRows& rows) : rows_(rows) { rows_.error_ = nullptr; }
    ~Step() { rows_.error_ = nullptr; }
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;

   private:
    FewRows& rows_;
  };

 private:
  int64_t rows_ = 0;
  std::string text_;
  std::exception_ptr error_;
};

}  // namespace infinitybatch
