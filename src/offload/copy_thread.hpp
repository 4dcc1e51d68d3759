#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace infinitybatch::offload {

/// Something that runs once, here or in a thread of its own.
class Task {
 public:
  explicit Task(std::function<void()> work) : work_(std::move(work)) {}

  using Clock = std::chrono::steady_clock;

  /// \param since when it could have begun
  void run(Clock::time_point since) noexcept;
  /// In the thread that will wait for it.
  void run_here() noexcept {
    ran_here_ = true;
    run(made_);
  }
  bool ran_here() const noexcept { return ran_here_; }
  Clock::time_point made() const noexcept { return made_; }
  /// Until it has run. \returns seconds that this took
  double wait();
  /// Throws what the work threw. Only after `wait`.
  void rethrow() const;
  /// How long it took, from when it could have begun. Only after `wait`.
  double seconds() const noexcept { return seconds_; }

 private:
  std::function<void()> work_;
  const Clock::time_point made_ = Clock::now();
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  bool ran_here_ = false;
  std::exception_ptr error_;
  double seconds_ = 0;
};

/// Runs tasks one after another in a thread that is started with the first.
class CopyThread {
 public:
  CopyThread() = default;
  /// Waits for the tasks that were given.
  ~CopyThread();
  CopyThread(const CopyThread&) = delete;
  CopyThread& operator=(const CopyThread&) = delete;

  void start(std::shared_ptr<Task> task);
  /// Whether tasks that were given have not run yet.
  bool busy();

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Task>> tasks_;
  bool ends_ = false;
  bool at_work_ = false;
  std::thread thread_;
};

}  // namespace infinitybatch::offload
