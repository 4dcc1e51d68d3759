#pragma once

#include "coupled/whole_batch_op.hpp"
#include "execute/native_numbers.hpp"
#include "execute/problem.hpp"
#include "execute/recorded.hpp"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace infinitybatch {

class BufferRule;
struct Findings;

/// Says that an op couples samples, why no tape is cut there, and what else can be done.
/// \throws CouplingError always
[[noreturn]] void refuse_to_cut(const std::string& op, const std::string& why);

/// Who stands in for the ops of a model that see the whole batch: one in front of each stretch but
/// the first, for all micro-batches together.
class StandIns {
 public:
  /// \param numbers that the stand-ins of random draws take; must outlive this
  StandIns(const Problem& problem, Findings& findings, const NativeNumbers& numbers)
      : problem_(problem), findings_(findings), numbers_(numbers) {}

  /// A micro-batch is recorded and cut. The first recording tells which ops there are.
  /// \throws CouplingError where another one runs other ops
  void meet(const std::shared_ptr<const Recorded>& recorded);
  /// Of the first micro-batch; null where none was met.
  const Recorded* first() const noexcept { return first_.get(); }
  /// Forgets all micro-batches.
  void forget();

  int64_t count() const noexcept { return static_cast<int64_t>(ops_.size()); }
  /// Whether they draw random numbers, so that nobody else does.
  bool draw() const noexcept { return numbers_.streams() != nullptr; }
  coupled::WholeBatchOp& before(int64_t stretch) { return *ops_[static_cast<size_t>(stretch) - 1]; }
  /// The op in front of a stretch has seen all rows: `buffers` learns what it leaves in them.
  void combine(int64_t stretch, BufferRule& buffers);
  void begin_backward(bool keep);

 private:
  void agree(const Recorded& here) const;

  const Problem& problem_;
  Findings& findings_;
  const NativeNumbers& numbers_;
  std::shared_ptr<const Recorded> first_;
  std::vector<std::unique_ptr<coupled::WholeBatchOp>> ops_;  // in front of stretches 1, 2, …
  coupled::SettledBuffers settled_;
};

}  // namespace infinitybatch
