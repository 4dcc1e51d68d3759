#include <infinitybatch/train/loader.hpp>

#include "core/kept_batch.hpp"

#include <ATen/CPUGeneratorImpl.h>

#include <mutex>
#include <utility>

namespace infinitybatch {

LogicalBatch::LogicalBatch(const Batch& inputs, const Batch& targets)
    : inputs(BatchSource::from(inputs, "inputs")), targets(targets_as_given(targets)) {}

namespace loaders {
namespace {

class Indexed final : public Loader {
 public:
  Indexed(int64_t count, std::function<LogicalBatch(int64_t, int64_t)> make)
      : count_(count), make_(std::move(make)) {}

  void begin(int64_t epoch, int64_t skip) override {
    epoch_ = epoch;
    next_ = skip;
  }
  std::optional<LogicalBatch> next() override {
    if (next_ >= count_) return std::nullopt;
    return make_(epoch_, next_++);
  }

 private:
  int64_t count_;
  std::function<LogicalBatch(int64_t, int64_t)> make_;
  int64_t epoch_ = 0;
  int64_t next_ = 0;
};

class Generated final : public Loader {
 public:
  using Next = std::function<std::optional<LogicalBatch>()>;

  explicit Generated(std::function<Next(int64_t)> begin) : begin_(std::move(begin)) {}

  void begin(int64_t epoch, int64_t skip) override {
    next_ = begin_(epoch);
    for (int64_t batch = 0; batch < skip; ++batch) next_();
  }
  std::optional<LogicalBatch> next() override { return next_(); }

 private:
  std::function<Next(int64_t)> begin_;
  Next next_;
};

/// The default generator's state on the host.
at::Tensor random_state() {
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void set_random_state(const at::Tensor& state) {
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

class Repeatable final : public Loader {
 public:
  using Next = std::function<std::optional<LogicalBatch>()>;

  explicit Repeatable(std::function<Next(int64_t)> begin) : begin_(std::move(begin)) {}

  void begin(int64_t epoch, int64_t skip) override {
    const bool again = begun_.defined() && epoch == epoch_;
    const at::Tensor now = random_state();
    if (again) {
      set_random_state(begun_);
    } else {
      begun_ = now;
      before_ = at::Tensor();
    }
    epoch_ = epoch;
    next_ = begin_(epoch);
    for (int64_t batch = 0; batch < skip; ++batch) next_();
    // The batch that failed is drawn with the numbers that it would have been drawn with.
    if (again) set_random_state(before_.defined() ? before_ : now);
    before_ = at::Tensor();
  }
  std::optional<LogicalBatch> next() override {
    before_ = random_state();
    auto batch = next_();
    before_ = at::Tensor();
    if (!batch) begun_ = at::Tensor();
    return batch;
  }

 private:
  std::function<Next(int64_t)> begin_;
  Next next_;
  int64_t epoch_ = -1;
  at::Tensor begun_;   ///< random state at the beginning of the epoch at work
  at::Tensor before_;  ///< likewise of a batch that failed
};

}  // namespace

namespace detail {

std::shared_ptr<Loader> repeatable(
    std::function<std::function<std::optional<LogicalBatch>()>(int64_t epoch)> begin) {
  return std::make_shared<Repeatable>(std::move(begin));
}

}  // namespace detail

std::shared_ptr<Loader> indexed(int64_t count,
                                std::function<LogicalBatch(int64_t epoch, int64_t batch)> make) {
  return std::make_shared<Indexed>(count, std::move(make));
}

std::shared_ptr<Loader> generated(
    std::function<std::function<std::optional<LogicalBatch>()>(int64_t epoch)> begin) {
  return std::make_shared<Generated>(std::move(begin));
}

}  // namespace loaders
}  // namespace infinitybatch
