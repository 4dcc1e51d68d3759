#pragma once

#include <ATen/core/TensorBody.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <vector>

namespace infinitybatch::tape {
class SeenOp;
}

namespace infinitybatch::coupled {

/// A buffer that forward moved by the mean of something that each sample has for itself.
struct SampleMean {
  at::Tensor buffer;
  int64_t count = 0;  ///< of what the mean was taken; 0 where it is not known what it holds
};

/// Notices running statistics of InstanceNorm: means of the samples' own statistics, so that what
/// micro-batches leave there, weighted by their rows, adds up to what the whole batch leaves. Where
/// another op reads one afterwards it is not known what follows.
class SampleMeans {
 public:
  /// \param op one that no other op called
  void observe(const tape::SeenOp& op);
  void clear() { means_.clear(); }
  bool empty() const noexcept { return means_.empty(); }
  /// Since `clear`.
  std::vector<SampleMean> take();

 private:
  void note(const c10::IValue& buffer, int64_t count);
  void look_for_reads(const tape::SeenOp& op);

  std::vector<SampleMean> means_;
};

}  // namespace infinitybatch::coupled
