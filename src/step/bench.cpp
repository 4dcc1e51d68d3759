#include <infinitybatch/step/bench.hpp>

#include "core/foreign_exception.hpp"
#include "core/in_step.hpp"
#include "core/out_of_memory.hpp"
#include "step/admission.hpp"
#include "step/examined_model.hpp"
#include "step/native_loss.hpp"

#include <infinitybatch/core/errors.hpp>
#include <infinitybatch/memory/limit.hpp>
#include <infinitybatch/memory/statistics.hpp>

#include <ATen/DeviceAccelerator.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <random>

namespace infinitybatch {
namespace {

constexpr size_t kLeastRounds = 3;
constexpr int kMostRehearsals = 40;

/// What clocks say at one moment, in seconds.
struct Instant {
  explicit Instant(at::Device device) {
    if (!device.is_cpu()) at::accelerator::synchronizeDevice(device.index());
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    wall = std::chrono::duration<double>(now).count();
#if defined(CLOCK_PROCESS_CPUTIME_ID)
    timespec time{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    cpu = static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
#else
    cpu = static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
#endif
  }
  double wall = 0;
  double cpu = 0;
};

/// Linear interpolation between the two order statistics around `share` of the way.
double quantile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  const double place = share * static_cast<double>(values.size() - 1);
  const auto below = static_cast<size_t>(place);
  const size_t above = std::min(below + 1, values.size() - 1);
  return values[below] + (place - static_cast<double>(below)) * (values[above] - values[below]);
}

Ratio ratio(const std::vector<double>& ours, const std::vector<double>& reference) {
  std::vector<double> ratios;
  for (size_t i = 0; i < ours.size(); ++i) ratios.push_back(ours[i] / reference[i]);
  return {quantile(ratios, 0.25), quantile(ratios, 0.5), quantile(ratios, 0.75)};
}

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

/// Why the exception at work means that something does not fit; throws it on where it says
/// something else.
std::string why_it_does_not_fit() {
  const std::exception_ptr error = std::current_exception();
  keep_foreign_exception(error);
  try {
    std::rethrow_exception(error);
  } catch (const BudgetExceeded& told) {
    return first_line(told.what_without_backtrace());
  } catch (const std::exception& told) {
    if (!is_out_of_memory(error)) throw;
    const auto* of_torch = dynamic_cast<const c10::Error*>(&told);
    return first_line(of_torch == nullptr ? told.what() : of_torch->what_without_backtrace());
  }
}

/// A strategy while it is measured.
struct Contestant {
  StrategyTimes times;
  std::function<void()> run;
};

/// One logical batch and one model, computed in several ways.
class Race {
 public:
  Race(const Problem& problem, const Loss& loss, const std::optional<CoupledLoss>& native,
       const Options& options, const BenchOptions& how)
      : problem_(problem),
        loss_(loss),
        native_(native),
        options_(options),
        how_(how),
        whole_loss_(losses::coupled([this](const Batch& outputs, const Batch& targets) {
          return native_loss(loss_, native_, problem_.device, problem_.batch_size(), outputs,
                             targets);
        })),
        model_(problem) {}

  BenchReport run() {
    model_.reset();
    BenchReport report;
    report.batch_size = problem_.batch_size();
    report.live_bytes = memory::live(problem_.device);
    if (options_.memory_budget)
      report.memory_budget = options_.memory_budget->resolve(problem_.device);
    line_up();
    measure(report);
    for (Contestant& contestant : contestants_) {
      report.strategies.push_back(std::move(contestant.times));
    }
    compare(report);
    return report;
  }

 private:
  /// Each strategy once, for its peak, and to see whether it fits.
  void line_up() {
    Contestant native;
    native.times.name = native.times.strategy = "native";
    native.times.micro_batch_sizes = {problem_.batch_size()};
    native.run = [this] { run_native(); };
    contestants_.push_back(std::move(native));
    int64_t size = 0;
    if (std::holds_alternative<SeparableLoss>(loss_)) {
      size = add("stream", loss_, options_);
    } else if (!options_.micro_batch_size) {
      size = add("planned", loss_, options_);
    } else {
      size = std::min(*options_.micro_batch_size, problem_.batch_size());
    }
    add_two_passes(size);
    if (std::none_of(contestants_.begin() + 1, contestants_.end(),
                     [](const Contestant& c) { return c.times.timed(); })) {
      std::rethrow_exception(does_not_fit_);
    }
    // Last: what it leaves in the caches of torch and of the system is no rehearsal's concern.
    Contestant& whole = contestants_.front();
    try {
      model_.reset();
      const memory::PeakScope peak(problem_.device);
      run_native();
      whole.times.peak_bytes = peak.peak();
    } catch (...) {
      whole.times.why_not = why_it_does_not_fit();
    }
    model_.reset();
  }

  void add_two_passes(int64_t size) {
    Options options = options_;
    options.micro_batch_size = size;
    // On a system that promises more memory than it has, trying would end the process.
    if (!options.memory_budget) options.memory_budget = "auto";
    const int64_t count = (problem_.batch_size() + size - 1) / size;
    const Loss loss = whole_loss_;
    add("retain-none", loss, options);
    if (contestants_.back().times.strategy != "rerun") {
      options.use_tapes = false;
      add("rerun", loss, options);
      options.use_tapes = true;
    }
    // Kept graphs are those on the device.
    if (options.offload.when == Offload::When::automatic)
      options.offload.when = Offload::When::never;
    if (count > 1) {
      options.retained_micro_batches = count / 2;
      add("retain-half", loss, options);
    }
    options.retained_micro_batches = count;
    add("retain-all", loss, options);
  }

  /// Runs it until its plan does not change any more. Returns its micro-batch size.
  int64_t add(const std::string& name, const Loss& loss, const Options& options) {
    const auto batch = std::make_shared<VirtualBatch>(*problem_.model, loss, options);
    Contestant contestant;
    contestant.times.name = name;
    contestant.run = [this, batch] { batch->backward(*problem_.inputs, *problem_.targets); };
    StepReport report;
    try {
      std::vector<int64_t> before;
      for (int step = 0; step < kMostRehearsals; ++step) {
        model_.reset();
        model_.watch([&] { report = batch->backward(*problem_.inputs, *problem_.targets); });
        const bool settled =
            (step & (step + 1)) != 0 &&  // else it looks at other rows
            (options.micro_batch_size || (report.predicted_peak_bytes && report.restarts == 0 &&
                                          report.micro_batch_sizes == before));
        if (settled) break;
        before = report.micro_batch_sizes;
      }
    } catch (...) {
      contestant.times.why_not = why_it_does_not_fit();
      if (!options_.micro_batch_size && !options.micro_batch_size) throw;  // no size to go on with
      does_not_fit_ = std::current_exception();
    }
    model_.reset();
    contestant.times.strategy = report.strategy;
    contestant.times.micro_batch_sizes = report.micro_batch_sizes;
    contestant.times.peak_bytes = report.peak_bytes;
    contestants_.push_back(std::move(contestant));
    return report.micro_batch_sizes.empty() ? options.micro_batch_size.value_or(1)
                                            : *std::max_element(report.micro_batch_sizes.begin(),
                                                                report.micro_batch_sizes.end());
  }

  void run_native() {
    const InStep running;
    std::optional<memory::Limit> limit;  // as above
    if (problem_.device.is_cpu()) limit.emplace(memory::Budget("auto").resolve(problem_.device));
    const Batch inputs =
        to_device(problem_.inputs->rows(0, problem_.batch_size()), problem_.device);
    const Batch targets =
        to_device(problem_.targets->rows(0, problem_.batch_size()), problem_.device);
    whole_loss_.value(model_.forward(inputs), targets).backward();
  }

  void measure(BenchReport& report) {
    std::vector<Contestant*> order;
    for (Contestant& contestant : contestants_) {
      if (contestant.times.timed()) order.push_back(&contestant);
    }
    std::mt19937 random(0);
    const double start = Instant(problem_.device).wall;
    const auto in_time = [&] {
      return report.rounds < static_cast<int64_t>(kLeastRounds) ||
             Instant(problem_.device).wall - start < how_.seconds;
    };
    for (; report.rounds < how_.rounds && in_time(); ++report.rounds) {
      std::shuffle(order.begin(), order.end(), random);
      for (Contestant* contestant : order) {
        model_.reset();
        if (options_.interrupt) options_.interrupt();
        const Instant begin(problem_.device);
        contestant->run();
        const Instant end(problem_.device);
        contestant->times.cpu_seconds.push_back(end.cpu - begin.cpu);
        contestant->times.wall_seconds.push_back(end.wall - begin.wall);
      }
    }
  }

  /// Where torch computes on the CPU its time is what a strategy costs; elsewhere the host waits.
  const std::vector<double>& cost(const StrategyTimes& times) const {
    return problem_.device.is_cpu() ? times.cpu_seconds : times.wall_seconds;
  }

  void compare(BenchReport& report) const {
    const StrategyTimes* reference = &report.strategies.front();
    if (!reference->timed()) {
      const auto cheaper = [&](const StrategyTimes& a, const StrategyTimes& b) {
        return a.timed() && (!b.timed() || quantile(cost(a), 0.5) < quantile(cost(b), 0.5));
      };
      reference = &*std::min_element(report.strategies.begin(), report.strategies.end(), cheaper);
    }
    report.reference = reference->name;
    for (StrategyTimes& times : report.strategies) {
      if (!times.timed()) continue;
      times.cpu = ratio(times.cpu_seconds, reference->cpu_seconds);
      times.wall = ratio(times.wall_seconds, reference->wall_seconds);
    }
  }

  const Problem& problem_;
  const Loss& loss_;
  const std::optional<CoupledLoss>& native_;
  const Options& options_;
  const BenchOptions& how_;
  const CoupledLoss whole_loss_;
  ExaminedModel model_;
  std::vector<Contestant> contestants_;  // native first
  std::exception_ptr does_not_fit_;
};

void check(const Options& options, const BenchOptions& how) {
  if (how.rounds < 1) {
    throw InvalidArgument("rounds is " + std::to_string(how.rounds) + "; it is 1 or more");
  }
  if (!(how.seconds > 0)) {
    throw InvalidArgument("seconds is " + std::to_string(how.seconds) +
                          "; it is a time above 0, after which no further round begins");
  }
  if (options.retained_micro_batches != 0 || !options.use_tapes) {
    throw InvalidArgument(
        "bench tries none, half and all micro-batches retained, with tapes and without; leave "
        "retained_micro_batches and use_tapes out");
  }
}

}  // namespace

BenchReport bench(const Model& model, const Loss& loss, const BatchSource& inputs,
                  const BatchSource& targets, Options options, const BenchOptions& how,
                  const std::optional<CoupledLoss>& native) {
  check(options, how);
  refuse_batch_dim(options.batch_dim);
  options.on_micro_batch = nullptr;
  options.loss_scale = nullptr;
  options.keep_outputs = false;
  VirtualBatch(model, loss, options);  // throws what it does not take
  const BatchSource beside = targets_for(loss, targets, inputs.size);
  const Problem problem = admitted(model, loss, inputs, beside);
  return Race(problem, loss, native, options, how).run();
}

BenchReport bench(const Model& model, const Loss& loss, const Batch& inputs, const Batch& targets,
                  Options options, const BenchOptions& how,
                  const std::optional<CoupledLoss>& native) {
  const Sources sources =
      sources_of(inputs, targets, std::exchange(options.batch_dim, std::nullopt), loss);
  return bench(model, loss, sources.inputs, sources.targets, std::move(options), how, native);
}

}  // namespace infinitybatch
