#include "copy_thread.hpp"

#include <chrono>

namespace infinitybatch::park {
namespace {

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

void Task::run() noexcept {
  const auto begin = std::chrono::steady_clock::now();
  std::exception_ptr error;
  try {
    work_();
  } catch (...) {
    error = std::current_exception();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  work_ = nullptr;
  error_ = std::move(error);
  seconds_ = seconds_since(begin);
  done_ = true;
  changed_.notify_all();
}

double Task::wait() {
  const auto begin = std::chrono::steady_clock::now();
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
  while (true) {
    changed_.wait(lock, [this] { return ends_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    const std::shared_ptr<Task> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task->run();
    lock.lock();
  }
}

}  // namespace infinitybatch::park
