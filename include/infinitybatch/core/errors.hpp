#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <optional>
#include <string>

namespace infinitybatch {

/// Base of every error that this library raises. Each message carries numbers and a way out.
/// Python sees the same hierarchy, with the built-in base named beside each class.
class Error : public c10::Error {
 public:
  explicit Error(const std::string& message) : c10::Error(message) {}
};

/// An argument whose value cannot be used (Python: also a ValueError).
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

/// An argument of a type that cannot be used (Python: also a TypeError).
class InvalidType : public Error {
 public:
  using Error::Error;
};

/// A batch that cannot be split; the message names the leaf, as in `inputs['mask']`.
class BatchError : public InvalidArgument {
 public:
  using InvalidArgument::InvalidArgument;
};

/// Something that couples samples, so that micro-batches alone cannot give the exact gradient.
class CouplingError : public Error {
 public:
  CouplingError(std::string op, const std::string& message) : Error(message), op_(std::move(op)) {}
  /// What couples the samples: an operator ("aten::batch_norm") or a buffer's name.
  const std::string& op() const noexcept { return op_; }

 private:
  std::string op_;
};

/// A model or a call for which no exact way is known yet.
class Unsupported : public Error {
 public:
  using Error::Error;
};

/// A call at the wrong moment: under `no_grad`, while another step runs on the same parameters.
class StateError : public Error {
 public:
  using Error::Error;
};

/// No plan stays inside the memory budget (Python: also a torch.OutOfMemoryError).
/// Raised before any observable change.
class BudgetExceeded : public Error {
 public:
  /// \param needed            bytes that the request needs; a lower bound if `smallest_feasible` is
  /// empty
  /// \param limit             bytes that the user allows
  /// \param smallest_feasible the smallest budget in bytes that would work, where it is known
  /// \param with_gradients    bytes that are live before the step, and those of the gradients of
  /// all parameters: most steps need as many at least; 0 where nobody knows
  BudgetExceeded(int64_t needed, int64_t limit, std::optional<int64_t> smallest_feasible,
                 const std::string& what_needs_it, int64_t with_gradients = 0);
  int64_t needed() const noexcept { return needed_; }
  int64_t limit() const noexcept { return limit_; }
  std::optional<int64_t> smallest_feasible() const noexcept { return smallest_feasible_; }

 private:
  int64_t needed_;
  int64_t limit_;
  std::optional<int64_t> smallest_feasible_;
};

/// Host memory and disk cannot hold what has to wait there, or the disk failed.
class OffloadError : public Error {
 public:
  /// \param needed    bytes that had to be offloaded
  /// \param available bytes that there was room for, as far as that is known
  OffloadError(int64_t needed, int64_t available, const std::string& message)
      : Error(message), needed_(needed), available_(available) {}
  int64_t needed() const noexcept { return needed_; }
  int64_t available() const noexcept { return available_; }

 private:
  int64_t needed_;
  int64_t available_;
};

}  // namespace infinitybatch
