#include "offload/copy_thread.hpp"

#include <algorithm>
#include <chrono>

namespace infinitybatch::offload {
namespace {

double seconds_since(Task::Clock::time_point begin) {
  return std::chrono::duration<double>(Task::Clock::now() - begin).count();
}

}  // namespace

void Task::run(Clock::time_point since) noexcept {
  std::exception_ptr error;
  try {
    work_();
  } catch (...) {
    error = std::current_exception();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  work_ = nullptr;
  error_ = std::move(error);
  seconds_ = seconds_since(since);
  done_ = true;
  changed_.notify_all();
}

double Task::wait() {
  const Clock::time_point begin = Clock::now();
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return done_; });
  return seconds_since(begin);
}

void Task::rethrow() const {
  if (error_) std::rethrow_exception(error_);
}

CopyThread::~CopyThread() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

bool CopyThread::busy() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return at_work_ || !tasks_.empty();
}

void CopyThread::start(std::shared_ptr<Task> task) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    if (!thread_.joinable()) {
      try {
        thread_ = std::thread([this] { work(); });
      } catch (...) {
        tasks_.pop_back();
        throw;
      }
    }
  }
  changed_.notify_all();
}

void CopyThread::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  Task::Clock::time_point free;
  while (true) {
    changed_.wait(lock, [this] { return ends_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    const std::shared_ptr<Task> task = std::move(tasks_.front());
    tasks_.pop_front();
    at_work_ = true;
    lock.unlock();
    task->run(std::max(task->made(), free));
    lock.lock();
    free = Task::Clock::now();
    at_work_ = false;
  }
}

}  // namespace infinitybatch::offload
