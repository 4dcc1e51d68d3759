#pragma once

#include "core/check.hpp"
#include "core/thread_context.hpp"
#include "coupled/watched_memory.hpp"
#include "execute/left_tensors.hpp"
#include "execute/plain_runs.hpp"

#include <infinitybatch/core/model.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace infinitybatch {

/// Notices tensors that a module carries from one call to the next in a plain attribute (a hidden
/// state, a moving average, a cache that grows): one that an op of a forward reads, and that is
/// another tensor, or has other values, after it. Each micro-batch would see what the one before
/// left there, where the whole batch sees what the step before left. Attributes that are only
/// written (attention maps for a plot) or only read (tables that are made once) are nobody's
/// concern.
class CarriedState final : public Check {
 public:
  explicit CarriedState(coupled::WatchedMemory& memory)
      : memory_(memory), runs_(std::make_shared<PlainRuns>()) {}
  /// Of a forward that nobody asked for: its failure, too, leaves nothing.
  /// \param beside of those that count: it finds the numbers that they find
  CarriedState(coupled::WatchedMemory& memory, const CarriedState& beside)
      : memory_(memory), beside_(&*beside.runs_), runs_(std::make_shared<PlainRuns>()) {}

  /// Attributes that lie in the memory of these are put back with them.
  void leave(const std::vector<at::Tensor>& buffers);

  /// While it lives, forwards in this thread are told to a state. Scopes may nest.
  class Scope {
   public:
    /// \param state null where nobody wants to know
    /// \param rows those that forward sees: of all of the logical batch nothing can be carried, and
    /// it is only put back when the step fails
    /// \param batch samples of the logical batch
    Scope(CarriedState* state, Rows rows, int64_t batch) noexcept;

   private:
    const Within<&ThreadContext::carried_state> within_;
  };
  /// Whoever runs a model that has plain attributes tells this one about each forward; null where
  /// nobody wants to know.
  static CarriedState* at_work() noexcept;

  void before_forward(const PlainLook& look);
  /// \throws CouplingError naming the attribute
  void after_forward();
  /// Instead, where forward failed: a state of other rows has another shape.
  /// \throws CouplingError where it had read what an earlier forward left
  void forward_failed(const std::string& how);
  /// Whether a state was found.
  bool found() const noexcept { return found_ || runs_->found(); }
  /// Whether the first forward left attributes as it found them.
  bool found_no_change() const noexcept { return runs_->begun() && runs_->quiet(); }
  /// From now on `take_left` is asked after each forward.
  void collect_left() noexcept { collects_ = true; }
  /// Tensors with a graph that the last forward left in attributes.
  std::vector<at::Tensor> take_left() { return std::exchange(with_graph_, {}); }
  /// What attributes were given by forwards of parts of the batch.
  const LeftTensors& left() const noexcept { return left_behind_; }
  /// Attributes hold what they held in front of the first forward.
  void roll_back() override;
  void commit() override { runs_->commit(); }
  /// Of the forwards that count.
  PlainRuns& runs() noexcept { return *runs_; }
  /// For runs that come when this one is gone.
  std::shared_ptr<PlainRuns> take_runs() const { return runs_; }

 private:
  struct Seen {
    std::string name;
    at::Tensor tensor;
    uint32_t version = 0;
  };

  bool has_read(const at::Tensor& tensor) const;
  bool is_left(const at::Tensor& tensor) const;
  void collect(const std::vector<NamedParameter>& left);
  [[noreturn]] void refuse(const std::string& name, const std::string& more);

  coupled::WatchedMemory& memory_;
  void part_is_over();
  void note_left(const std::vector<NamedParameter>& left);

  bool part_ = false;
  Rows rows_;
  int64_t batch_ = 0;
  bool first_ = true;
  const PlainRuns* beside_ = nullptr;
  bool idle_ = false;  // no attribute has changed
  std::unordered_set<const c10::StorageImpl*> of_buffers_;
  std::unordered_set<const c10::TensorImpl*> found_there_;  // in front of the first forward
  std::unordered_set<const c10::TensorImpl*> left_;         // by the last forward
  LeftTensors left_behind_;
  std::vector<at::Tensor> with_graph_;
  bool collects_ = false;
  bool found_ = false;
  std::vector<Seen> before_;
  std::shared_ptr<PlainRuns> runs_;
  PlainLook look_;
};

}  // namespace infinitybatch
