#pragma once

#include <infinitybatch/core/batch.hpp>
#include <infinitybatch/step/left_place.hpp>

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

namespace infinitybatch {

/// What forwards of micro-batches leave beside their outputs (features in an attribute, what a hook
/// has kept), where whoever looks afterwards would find the last one's alone. Tensors with a row
/// for each sample are further outputs, detached, while micro-batches are computed; in the end they
/// are joined, and lie where a forward over the whole batch leaves them. Backward through one whose
/// original has a graph is an error.
class LeftOutputs {
 public:
  using Look = std::function<std::vector<LeftPlace>()>;
  using Arrange = std::function<at::Tensor(const at::Tensor& joined, int64_t dim)>;

  /// \param total samples of the whole batch
  /// \param most  bytes that what is joined may take
  /// \param lists whether forward itself adds to them, each time
  LeftOutputs(Look look, int64_t total, int64_t most, bool lists = true);

  /// Names of what is joined, as `adopt` takes them.
  struct Entry {
    std::string place;
    size_t index = 0;  ///< of a list: among what one forward adds
    bool list = false;
    int64_t same_output = -1;  ///< it is this leaf of the outputs itself
    bool has_graph = false;
  };
  const std::vector<Entry>& entries() const noexcept { return entries_; }
  /// Of an earlier call, whose program runs again without forward.
  void adopt(std::vector<Entry> entries);

  /// Outputs of `forward`, and what it left behind them.
  Batch with_left(int64_t rows, const std::function<Batch()>& forward);
  /// How many tensors stand behind the outputs.
  size_t count() const noexcept { return appended_; }
  /// Takes off what stands behind them. \param keep for `hand_out`, of the next micro-batch
  Batch without_left(Batch outputs, bool keep, bool copies = false);
  /// Whether a micro-batch of another size would tell along which dimension samples lie.
  bool is_ambiguous(int64_t rows) const;
  /// All micro-batches have been there.
  /// \param outputs of the whole batch
  /// \param arrange of what was joined along a dimension, puts rows where they belong; may be null
  void hand_out(const std::vector<int64_t>& row_counts, const Batch& outputs,
                const Arrange& arrange = nullptr);
  /// Where the last micro-batch's stay, which differ from the first one's.
  std::vector<std::string> not_joined() const;

 private:
  struct Other {  ///< cannot be joined
    std::string place;
    bool list = false;
    size_t index = 0;
    at::Tensor first;
    at::Tensor seen;  // by the forward at work, which may be a trial
    at::Tensor last;
    bool certain = false;  ///< that they differ
  };
  using Known = std::unordered_set<const void*>;

  Batch append(Batch outputs, const std::vector<at::Tensor>& tensors);
  void decide(int64_t rows, const Batch& outputs, const std::vector<LeftPlace>& now,
              const Known& before, std::vector<at::Tensor>& tensors);
  void meet(const std::vector<LeftPlace>& now, const Known& before,
            std::vector<at::Tensor>& tensors);
  bool is_item(size_t entry, const at::Tensor& tensor) const;
  void note_others(const std::vector<LeftPlace>& now, const Known& before);

  const Look look_;
  const int64_t total_;
  const int64_t most_;
  const bool lists_;
  bool decided_ = false;
  bool idle_ = false;    // forward leaves nothing
  size_t appended_ = 0;  // how many of the entries are no output
  std::vector<Entry> entries_;
  std::vector<Other> others_;
  std::vector<Batch> parts_;  // what was kept, micro-batch by micro-batch
  std::vector<std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>>> items_;  // of lists, by entry
};

}  // namespace infinitybatch
