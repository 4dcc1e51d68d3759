#pragma once

#include <ATen/core/TensorBody.h>

#include <any>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace infinitybatch {

/// One leaf of a Batch: a tensor with a batch dimension, a tensor that every micro-batch sees
/// whole, or a value that is no tensor (always seen whole).
struct Leaf {
  at::Tensor tensor;      ///< undefined where the leaf is no tensor
  std::any object;        ///< the value where the leaf is no tensor
  int64_t batch_dim = 0;  ///< the dimension that is split; `kShared` where the leaf is seen whole
  bool marked = false;    ///< its owner has said so (`shared`, `with_batch_dim`)
  /// Of targets and outputs: rows of each sample along `batch_dim`, 1 but where a model flattens
  /// time and batch (`decoded.view(-1, vocabulary)`).
  int64_t places = 1;
  /// Whether row `place * samples + n` is sample `n`'s, as where [time, batch] is flattened; else
  /// row `n * places + place`.
  bool interleaved = false;

  static constexpr int64_t kShared = -1;
};

/// How the leaves of a Batch are arranged. Immutable and shared by all slices of a batch.
class Structure {
 public:
  enum class Kind { leaf, tuple, list, dict, foreign };

  static std::shared_ptr<const Structure> leaf();
  static std::shared_ptr<const Structure> tuple(
      std::vector<std::shared_ptr<const Structure>> children);
  static std::shared_ptr<const Structure> list(
      std::vector<std::shared_ptr<const Structure>> children);
  static std::shared_ptr<const Structure> dict(
      std::vector<std::string> keys, std::vector<std::shared_ptr<const Structure>> children);
  /// A structure that only the caller can read (a Python pytree).
  /// \param names one name for each leaf, as it should stand in messages: "['mask']"
  static std::shared_ptr<const Structure> foreign(std::any tree, std::vector<std::string> names);

  Kind kind() const noexcept { return kind_; }
  size_t leaf_count() const noexcept { return leaf_count_; }
  const std::vector<std::string>& keys() const noexcept { return keys_; }
  const std::vector<std::shared_ptr<const Structure>>& children() const noexcept {
    return children_;
  }
  const std::any& tree() const noexcept { return tree_; }
  /// The path to leaf `index`, to be put behind the batch's own name: "", "[0]", "['mask'][1]".
  std::string leaf_name(size_t index) const;

 private:
  Kind kind_ = Kind::leaf;
  size_t leaf_count_ = 1;
  std::vector<std::string> keys_;
  std::vector<std::shared_ptr<const Structure>> children_;
  std::any tree_;
};

/// Nested tensors with a batch dimension: what a model takes and what it returns.
///
/// A Batch is a flat list of leaves and a structure. The first dimension of each tensor is the
/// batch unless told otherwise.
///
///     Batch images = tensor;
///     Batch pair = Batch::tuple({ids, mask});
///     Batch named = Batch::dict({{"ids", ids}, {"positions", Batch(positions).shared()}});
class Batch {
 public:
  Batch();
  Batch(at::Tensor tensor);  // NOLINT: a tensor is the most common batch
  Batch(std::vector<Leaf> leaves, std::shared_ptr<const Structure> structure);

  static Batch tuple(std::vector<Batch> children);
  static Batch list(std::vector<Batch> children);
  static Batch dict(std::vector<std::pair<std::string, Batch>> children);
  /// A leaf that is no tensor.
  static Batch object(std::any value);

  /// The same batch with every leaf seen whole by every micro-batch.
  Batch shared() const;
  /// The same batch with every tensor split along `dim` (0 or more).
  Batch with_batch_dim(int64_t dim) const;

  const std::vector<Leaf>& leaves() const noexcept { return leaves_; }
  std::vector<Leaf>& leaves() noexcept { return leaves_; }
  const std::shared_ptr<const Structure>& structure() const noexcept { return structure_; }
  bool is_tensor() const noexcept;

  /// The only tensor of this batch. \throws InvalidType where the batch is nested.
  const at::Tensor& tensor() const;
  size_t size() const noexcept;                  ///< children of a tuple, list or dict
  Batch operator[](size_t index) const;          ///< child of a tuple or list
  Batch operator[](std::string_view key) const;  ///< child of a dict
  std::vector<at::Tensor> tensors() const;       ///< all tensor leaves, in order

 private:
  Batch child(size_t index) const;

  std::vector<Leaf> leaves_;
  std::shared_ptr<const Structure> structure_;
};

/// The number of samples in `batch`.
/// \param name what the batch is called in messages: "inputs", "targets"
/// \throws BatchError naming the leaf where sizes differ, a tensor has no batch dimension, the
/// batch
///         is empty, or no leaf has a batch dimension
int64_t batch_size(const Batch& batch, std::string_view name);

/// Rows begin to end of every leaf that has a batch dimension, as views.
Batch rows(const Batch& batch, int64_t begin, int64_t end);

/// Tensors that live on the host brought to `device`; tensors on any accelerator stay where they
/// are.
Batch to_device(const Batch& batch, at::Device device);

/// Without graph, each tensor in memory of its own size: a view would keep all of what it was cut
/// from.
Batch detached(const Batch& batch);

/// Joins what the model returned for consecutive micro-batches along the dimension whose size is
/// the number of rows in every one of them, which becomes its `batch_dim`; leaves that are no
/// tensor are taken from the first. A single part is taken as it is, `kShared` where no dimension
/// fits.
/// \param row_counts rows of each part
/// \throws BatchError naming the leaf that has no such dimension
Batch concatenate(std::vector<Batch> parts, const std::vector<int64_t>& row_counts,
                  std::string_view name);

}  // namespace infinitybatch
