#pragma once

#include "core/callback_errors.hpp"
#include "core/generator_state.hpp"
#include "coupled/coupling_watch.hpp"
#include "tape/op_bus.hpp"

#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace infinitybatch::coupled {

/// While it lives, what ops of this thread give depends on no other sample by design: random draws
/// give one number everywhere, BatchNorm in training mode scales and shifts alone, and the function
/// of `across_batch` gives a constant. What still differs between two splits of the same rows is
/// then no matter of chance, nor of ops that somebody stands in for.
///
/// BatchNorm adds how many of its rows there are for each sample, so that one that sees the samples
/// in pieces (Ghost BatchNorm) differs too.
class FixedOps final : public tape::OpListener {
 public:
  /// \param rows  samples that forward runs on
  /// \param watch knows the parameters: BatchNorm over one of them (standardised weights) has no
  ///              rows. Must outlive this
  /// \param backward whether gradients of what forward gives are asked for
  FixedOps(const std::vector<at::Device>& devices, int64_t rows, const CouplingWatch& watch,
           bool backward);
  ~FixedOps() override;
  FixedOps(const FixedOps&) = delete;
  FixedOps& operator=(const FixedOps&) = delete;

  /// Whether one lives in this thread: forward then runs for its outputs only.
  static bool at_work() noexcept { return tape::OpBus::listener<FixedOps>() != nullptr; }
  /// Whether numbers were drawn that nobody has fixed, or a result could not be replaced.
  /// \throws what failed in a callback, such as replacing a result without memory for it
  bool strayed();
  /// Whether an op that sees the whole batch was stood in for: gradients of samples are not their
  /// own then.
  bool stood_in() const noexcept { return stood_in_; }
  /// Another text where Python's or NumPy's generators stand elsewhere.
  std::map<std::string, std::string> foreign() const;

 private:
  struct Replaced;
  std::unique_ptr<tape::OpContext> begin(const tape::SeenOp& op) noexcept override;
  void end(const tape::SeenOp& op, tape::OpContext* context) noexcept override;
  std::unique_ptr<tape::OpContext> meet(const tape::SeenOp& op);
  void replace(const tape::SeenOp& op, Replaced& replaced);
  void run_still(const tape::SeenOp& op, Replaced& replaced);
  void put_back() const;
  /// Whether a generator stands elsewhere.
  bool moved() const;

  int64_t rows_;
  const CouplingWatch& watch_;
  bool backward_;
  int inside_ = 0;  // ops whose inner ops stay as they are
  std::vector<std::pair<at::Generator, GeneratorState>> generators_;
  bool strayed_ = false;
  CallbackErrors errors_;
  bool stood_in_ = false;
  std::optional<tape::OpBus::Scope> listening_;
};

}  // namespace infinitybatch::coupled
