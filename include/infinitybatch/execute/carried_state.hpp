#pragma once

#include <infinitybatch/core/model.hpp>
#include <infinitybatch/coupled/watched_memory.hpp>
#include <infinitybatch/execute/left_tensors.hpp>

#include <functional>
#include <string>
#include <unordered_set>
#include <vector>

namespace infinitybatch {

/// Tensors that a model keeps where nobody lists them: in plain attributes of its modules.
struct PlainState {
  std::vector<NamedParameter> tensors;
  /// Puts back what lay in the attributes, numbers too; what was written in place stays written.
  std::function<void()> restore;
};

/// Notices tensors that a module carries from one call to the next in a plain attribute (a hidden
/// state, a moving average, a cache that grows): one that an op of a forward reads, and that is
/// another tensor, or has other values, after it. Each micro-batch would see what the one before
/// left there, where the whole batch sees what the step before left. Attributes that are only
/// written (attention maps for a plot) or only read (tables that are made once) are nobody's
/// concern.
class CarriedState {
 public:
  /// \param trial of a forward that nobody asked for: its failure, too, leaves nothing
  explicit CarriedState(coupled::WatchedMemory& memory, bool trial = false)
      : memory_(memory), trial_(trial) {}

  /// While it lives, forwards in this thread are told to a state. Scopes may nest.
  class Scope {
   public:
    /// \param state null where nobody wants to know
    /// \param part forward sees a part of the logical batch; else nothing can be carried, and it is
    /// only put back when the step fails
    Scope(CarriedState* state, bool part) noexcept;
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    CarriedState* outer_;
  };
  /// Whoever runs a model that has plain attributes tells this one about each forward; null where
  /// nobody wants to know.
  static CarriedState* at_work() noexcept;

  void before_forward(PlainState state);
  /// \throws CouplingError naming the attribute
  void after_forward(const std::vector<NamedParameter>& now);
  /// Instead, where forward failed: a state of other rows has another shape.
  /// \throws CouplingError where it had read what an earlier forward left
  void forward_failed(const std::string& how);
  /// A forward in this thread failed by an error of its own: attributes stay as it left them, as
  /// they do natively.
  static void let_be() noexcept;
  /// Whether a state was found.
  bool found() const noexcept { return found_; }
  /// What attributes were given by forwards of parts of the batch.
  const LeftTensors& left() const noexcept { return left_behind_; }
  /// Attributes hold what they held in front of the first forward.
  void roll_back();

 private:
  struct Seen {
    std::string name;
    at::Tensor tensor;
    uint32_t version = 0;
  };

  bool has_read(const at::Tensor& tensor) const;
  [[noreturn]] void refuse(const std::string& name, const std::string& more);

  coupled::WatchedMemory& memory_;
  bool part_ = false;
  bool first_ = true;
  const bool trial_;
  bool idle_ = false;                                // no attribute changes
  std::unordered_set<const c10::TensorImpl*> left_;  // by the last forward
  LeftTensors left_behind_;
  bool found_ = false;
  std::vector<Seen> before_;
  std::function<void()> restore_;
};

}  // namespace infinitybatch
