#pragma once

#include <infinitybatch/step/virtual_batch.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace infinitybatch {

/// How long to measure.
struct BenchOptions {
  /// Each strategy runs once a round, in an order that changes from round to round.
  int64_t rounds = 9;
  /// No further round begins after this many, once three are done.
  double seconds = 60;
};

/// The median of the rounds' ratios, and the quartiles around it.
struct Ratio {
  double lower = 0;
  double median = 0;
  double upper = 0;
};

/// One way to get the gradient, as it was measured.
struct StrategyTimes {
  /// "native": the whole batch at once. "stream": one pass over micro-batches. "planned": two
  /// passes as the planner plans them. "retain-none", "retain-half", "retain-all": two passes, with
  /// so many micro-batches that keep their graph. "rerun": none retained, and the model runs again
  /// where "retain-none" replays what was recorded.
  std::string name;
  /// What the step itself reported: "stream", "replay", "rerun"; "native".
  std::string strategy;
  /// Why it was not timed: it does not fit, say. Empty where it was.
  std::string why_not;
  std::vector<int64_t> micro_batch_sizes;
  int64_t peak_bytes = 0;           ///< the most that tensors occupied, what was there included
  std::vector<double> cpu_seconds;  ///< of the process, all of its threads; one for each round
  std::vector<double> wall_seconds;
  Ratio cpu;  ///< over the reference's, round by round
  Ratio wall;

  bool timed() const noexcept { return why_not.empty(); }
};

/// What `bench` found.
struct BenchReport {
  int64_t batch_size = 0;
  int64_t rounds = 0;                    ///< that were run
  int64_t live_bytes = 0;                ///< what tensors occupied before
  std::optional<int64_t> memory_budget;  ///< bytes; of all but native
  /// What ratios are over: "native"; where native does not fit, the strategy that was cheapest.
  std::string reference;
  std::vector<StrategyTimes> strategies;

  /// For people: a table, and what could not be timed and why.
  std::string explain() const;
};

/// Times the ways to compute one batch's gradient against the native whole batch, in turn within
/// this process. Parameters, `.grad`, buffers and random state are as before afterwards. Parameter
/// hooks run, on each gradient that is computed.
///
/// Native gets the memory that is free, not the budget. A separable loss is streamed, and also run
/// as a coupled one would be, with the micro-batch size of the stream.
/// \param options as for VirtualBatch; its callbacks are not called
/// \param native  the loss as native code would compute it on the whole batch; nothing: `loss`
/// \throws InvalidArgument fewer rounds than 1, seconds that are not above 0, a number of retained
///                         micro-batches: all of them are tried
/// \throws BudgetExceeded  none but native fits the budget
/// and whatever VirtualBatch throws.
BenchReport bench(const Model& model, const Loss& loss, const BatchSource& inputs,
                  const BatchSource& targets, Options options = {}, const BenchOptions& how = {},
                  const std::optional<CoupledLoss>& native = std::nullopt);
BenchReport bench(const Model& model, const Loss& loss, const Batch& inputs, const Batch& targets,
                  Options options = {}, const BenchOptions& how = {},
                  const std::optional<CoupledLoss>& native = std::nullopt);

}  // namespace infinitybatch
