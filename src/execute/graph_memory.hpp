#pragma once

#include "core/callback_errors.hpp"
#include "offload/store.hpp"
#include "tape/op_bus.hpp"

#include <infinitybatch/core/batch.hpp>
#include <infinitybatch/execute/plan.hpp>

#include <ATen/core/ivalue.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <unordered_map>
#include <vector>

namespace infinitybatch {

/// The memory that one micro-batch's graph keeps alive, and where it waits for backward.
///
/// Torch does not tell what the nodes of a graph have saved. So the ops of a forward pass are
/// watched, all that are dispatched, those inside of others too: what they made and what lives when
/// forward is over and its inputs are let go of is kept by the graph, or by somebody else. Python's
/// references can be asked for: memory that it holds stays (a feature that a hook has put away, an
/// attention map in an attribute, tensors that an `autograd.Function` keeps in `ctx`). So does
/// memory of parameters, buffers, constants and inputs that others hold, which forward did not
/// make.
///
/// Storages move, whoever saved them: each once, however many saved tensors and views lie in it.
/// Tensors, views and version counters stay what they are, so that backward finds what it saved.
///
/// Not known: tensors that C++ code keeps elsewhere, and those taken by `.data`, which is no op.
/// Who reads them while they are away gets an error.
class GraphMemory final : public tape::OpListener {
 public:
  using Storages = std::set<const c10::StorageImpl*>;

  GraphMemory() = default;
  GraphMemory(GraphMemory&&) = default;
  GraphMemory& operator=(GraphMemory&&) = default;
  /// What others hold beside a graph that is gone, as after a failed step, comes back.
  ~GraphMemory() override;

  /// Rows that the forward will run on: those that were made for it, which nobody else holds yet,
  /// belong to what it makes.
  void know(const Batch& inputs);
  /// Runs `forward` in this thread and notes what memory its ops make.
  /// \throws what went wrong while noting it, too
  Batch watch(const std::function<Batch()>& forward);

  /// What lives of it begins to leave; with `offload` it has left. Call it when nobody uses the
  /// outputs' graph.
  /// \param staying memory that others use
  /// \returns bytes whose copies begin
  /// \throws OffloadError where there is no room
  int64_t start_leaving(offload::Store& store, const Storages& staying) {
    return leave(store, staying, /*in_background=*/true);
  }
  int64_t offload(offload::Store& store, const Storages& staying);

  /// What has left is there again; with `ahead` it begins to come.
  /// \throws what `Offloaded::bring_back` does
  int64_t fetch(bool ahead);

  /// What has left, and what could not.
  GraphBytes bytes() const;

 private:
  struct Memory {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // its address is not used again
    std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> tensors;
    bool made = false;       // by an op of this forward
    int depth = 0;           // else: of the op that was given it first
    bool resizable = false;  // when it was made; `numpy()` takes that away
    bool gone = false;
  };

  std::unique_ptr<tape::OpContext> begin(const tape::SeenOp& op) noexcept override;
  void end(const tape::SeenOp& op, tape::OpContext* context) noexcept override;
  /// \returns whether it has no memory beside what was met
  bool meet(const c10::IValue& value, bool made);
  bool meet(const at::Tensor& tensor, bool made);
  Memory* meet_part(const at::Tensor& tensor, bool made);
  int64_t leave(offload::Store& store, const Storages& staying, bool in_background);
  static bool held(const Memory& memory, const c10::StorageImpl& storage);

  std::vector<Memory> memories_;  // in the order of the ops
  std::unordered_map<const c10::StorageImpl*, size_t> at_;
  std::unordered_map<const c10::TensorImpl*, size_t> tensors_;  // and in which memory they lie
  int depth_ = 0;                                               // of the op at work
  std::vector<offload::Offloaded> offloaded_;
  CallbackErrors errors_;
};

/// The memory that these tensors lie in.
GraphMemory::Storages memory_of(const Batch& tensors);

/// Offloads what the graph of these outputs keeps. Others see the outputs detached, as `seen`, and
/// go on using them: first what they do not see leaves, so that there is room to make copies of
/// what they do, then the graph's own outputs. Call it when nobody uses the graph.
/// \param graph outputs that want no gradient are let go of
/// \param seen  in the same memory as `graph`, unless somebody else holds a leaf as well
/// \returns bytes that left
/// \throws OffloadError where there is no room
int64_t offload_graph(GraphMemory& memory, offload::Store& store, Batch& graph, Batch& seen);

}  // namespace infinitybatch
