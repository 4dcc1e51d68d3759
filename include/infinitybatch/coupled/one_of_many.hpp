#pragma once

namespace infinitybatch::coupled {

/// While it lives, this thread runs a single sample of a larger logical batch through a model whose
/// ops see all of it. Layers that refuse to normalise a single sample, as `torch.nn.BatchNorm1d`
/// does in Python, would not refuse the batch: bindings ask here whether to answer for them.
class OneOfMany {
 public:
  explicit OneOfMany(bool at_work);
  ~OneOfMany();
  OneOfMany(const OneOfMany&) = delete;
  OneOfMany& operator=(const OneOfMany&) = delete;

  static bool at_work() noexcept;

 private:
  bool outer_;
};

}  // namespace infinitybatch::coupled
