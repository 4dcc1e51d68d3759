#pragma once

#include <infinitybatch/step/virtual_batch.hpp>

#include <c10/core/ScalarType.h>

#include <optional>
#include <string>
#include <vector>

namespace infinitybatch {

/// How far one parameter's gradient, or what is left in one buffer, is from the native whole
/// batch's.
struct ParameterError {
  std::string name;
  double error = 0;    ///< ‖ours − native fp64‖ / ‖native fp64‖; see `VerifyReport`
  double allowed = 0;  ///< by contract
};

/// Gradients in one precision.
struct Comparison {
  c10::ScalarType type = c10::ScalarType::Undefined;
  std::vector<ParameterError>
      parameters;  ///< in the model's order; without those native leaves alone
  /// What the step left in buffers (running statistics, counters); in fp64 alone.
  std::vector<ParameterError> buffers;
  /// Whether each error is allowed.
  bool exact() const;
  /// The parameter whose error is the largest part of what is allowed. Null without parameters.
  const ParameterError* worst() const;
  /// The same of buffers.
  const ParameterError* worst_buffer() const;
};

/// What `verify` found.
///
/// In fp64 an error of 1e-12 is allowed, or ten times what native itself moves when the batch is
/// reversed, where that is more; but nothing beyond 1e-12 where it moves by more than 1e-8: that is
/// no rounding, the order of the samples matters. A model of fp64 is compared once, and `own` is
/// `in_fp64`. In the model's own precision the error against native fp64 may be
/// the larger of twice native's own and 8 roundings. A gradient that is zero in truth is measured
/// against the largest gradient of the model. What both ways leave in buffers is compared by the
/// same rule in fp64.
struct VerifyReport {
  int64_t batch_size = 0;
  int64_t rows = 0;  ///< compared: fewer than all where native does not fit into memory
  std::vector<int64_t> micro_batch_sizes;  ///< how the batch was computed
  std::string strategy;
  std::optional<Comparison> in_fp64;
  std::string why_no_fp64;  ///< why the model cannot be run in fp64
  Comparison own;           ///< in the model's own precision
  /// The first output in which one sample's value depends on another sample: "outputs[0]".
  std::optional<std::string> coupled_output;

  bool exact() const;
  /// For people: one line for each precision, the worst parameters, what couples samples.
  std::string explain() const;
};

/// Compares the gradients of a VirtualBatch with those of the native whole batch, and what both
/// leave in buffers, and looks for
/// samples that depend on each other without anybody having said so. Parameters, `.grad`, buffers
/// and random state are as before afterwards. Parameter hooks run, on each gradient that is
/// computed.
///
/// Where native does not fit into the memory that is there, the first half of the rows is compared,
/// or the first quarter, and so on; `rows` says so.
/// \param options as for VirtualBatch; its callbacks are not called
/// \param native  the loss as native code would compute it on the whole batch; nothing: `loss`
/// \throws Unsupported where forward draws random numbers: micro-batches draw others, so there is
///                     nothing to compare. Call eval(), set dropout to 0, or set
///                     `match_native_rng`. And where gradients differ and native itself gives
///                     others when it runs again on the same batch (a generator of the user's own)
/// and whatever VirtualBatch throws.
VerifyReport verify(const Model& model, const Loss& loss, const BatchSource& inputs,
                    const BatchSource& targets, Options options,
                    const std::optional<CoupledLoss>& native = std::nullopt);
VerifyReport verify(const Model& model, const Loss& loss, const Batch& inputs, const Batch& targets,
                    Options options, const std::optional<CoupledLoss>& native = std::nullopt);

}  // namespace infinitybatch
