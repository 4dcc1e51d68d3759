#pragma once

namespace infinitybatch::coupled {

/// While it lives, functions of `across_batch` run in this thread for the form of their result
/// alone: a binding undoes what they leave in its language.
class ProvisionalRun {
 public:
  ProvisionalRun() noexcept;
  ~ProvisionalRun();
  ProvisionalRun(const ProvisionalRun&) = delete;
  ProvisionalRun& operator=(const ProvisionalRun&) = delete;

  static bool at_work() noexcept;

 private:
  bool outer_;
};

}  // namespace infinitybatch::coupled
