#pragma once

#include <infinitybatch/core/micro_batch.hpp>
#include <infinitybatch/step/virtual_batch.hpp>

#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace infinitybatch {
class Trainer;
struct LogicalBatch;
}  // namespace infinitybatch

/// What a Trainer tells while it runs, by the names that Python has. Epochs and steps count from 0,
/// over all runs.
namespace infinitybatch::events {

/// A run begins.
struct RunBegin {
  Trainer& trainer;
  int64_t epoch = 0;   ///< whole epochs done
  int64_t step = 0;    ///< steps done
  int64_t epochs = 0;  ///< that this run is to do
};

/// A run ends by itself or by `Trainer::stop`; an exception is a Failure instead.
struct RunEnd {
  Trainer& trainer;
  int64_t epoch = 0;
  int64_t step = 0;
  bool stopped = false;
};

/// Not told again where training goes on in the middle of an epoch.
struct EpochBegin {
  Trainer& trainer;
  int64_t epoch = 0;
  int64_t step = 0;  ///< steps done before it
};

/// An epoch is done, its schedule's step included.
struct EpochEnd {
  Trainer& trainer;
  int64_t epoch = 0;
  int64_t step = 0;  ///< steps done, this epoch's included
  double loss = 0;   ///< mean over the epoch's samples, each before its step
  int64_t samples = 0;
  int64_t batches = 0;
  double seconds = 0;                  ///< of its steps and what was told in between
  std::vector<double> learning_rates;  ///< of each parameter group, from here on
};

/// A logical batch is about to be computed; told again where training goes on after a failure.
struct BatchBegin {
  Trainer& trainer;
  int64_t epoch = 0;
  int64_t step = 0;   ///< the number of this step
  int64_t batch = 0;  ///< its number in the epoch
  const LogicalBatch& data;
};

/// A logical batch's step is done, optimizer and schedule included. Told once for each step.
struct BatchEnd {
  Trainer& trainer;
  int64_t epoch = 0;
  int64_t step = 0;
  int64_t batch = 0;
  double loss = 0;  ///< of the whole logical batch, before its step
  int64_t samples = 0;
  std::shared_ptr<const StepReport> report;
  std::vector<double> learning_rates;  ///< of each parameter group, as this step used them
};

/// A micro-batch's loss is known; after a restart those computed again are told again.
struct MicroBatch {
  Trainer& trainer;
  int64_t epoch = 0;
  int64_t step = 0;
  const infinitybatch::MicroBatch& rows;
};

struct EvaluationBegin {
  Trainer& trainer;
  int64_t epoch = 0;
  int64_t step = 0;
};

struct EvaluationEnd {
  Trainer& trainer;
  int64_t epoch = 0;
  int64_t step = 0;
  double loss = 0;
  int64_t samples = 0;
  std::map<std::string, double> metrics;
  double seconds = 0;
};

/// A checkpoint lies whole at `path`.
struct CheckpointSaved {
  Trainer& trainer;
  int64_t epoch = 0;
  int64_t step = 0;
  std::string path;
};

/// An exception ends the run and is thrown after this.
struct Failure {
  Trainer& trainer;
  int64_t epoch = 0;
  int64_t step = 0;
  std::exception_ptr exception;
};

}  // namespace infinitybatch::events
